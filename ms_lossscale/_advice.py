"""What to tell a user whose training goes wrong: what may be the reason, and what to do."""

from ms_lossscale._arguments import listed
from ms_lossscale._output import counted

_MOST_NAMES = 5
# What to do about skips, by their reason.
_ON_SKIPS = {
    "condition": "nothing overflows, so look at the condition and its threshold, and leave the loss scale as it is",
    "loss": "no loss scale fixes a loss that is not finite: locate_overflow names the cell where it begins",
    "forward_state": "look at what the forward writes, see forward_state_names(). A normalisation's statistics are not "
    "finite if its input overflows in float16: ms_lossscale.advise_float32 finds the cells that need float32; with NaN "
    "in the data; or if a batch has one sample only, as a dataset's last one may. A value that is infinite on purpose "
    "must be in its Parameter before the first step",
    "gradients": "the backward overflows at every scale so far: find_loss_scale finds a lower one, if there is any, "
    "and ms_lossscale.advise_float32 the cells that need float32. A number as the loss scale does not fall",
    "not_begun": "call begin(*inputs) in each step, and run the forward on what it returns, before end(grads)",
    "detector": "all gradients are finite, so look at your overflow detector; or, where an NPU's status register "
    "tells, for values in the network that overflow and are clipped or masked afterwards",
}
_ON_GRADIENTS_OF_A_MANUAL_STEP = (
    "the backward overflows at every scale so far, or there is NaN in the data, "
    "which end(grads, loss=loss) would tell: locate_overflow(forward, [inputs]) names where it begins, "
    "and ms_lossscale.advise_float32 the cells that need float32. A number as the loss scale does not fall"
)


def on_skips(reason, is_manual):
    """Returns what to do about steps that are skipped for this reason; `is_manual` for those of a ManualStep."""
    return _ON_GRADIENTS_OF_A_MANUAL_STEP if is_manual and reason == "gradients" else _ON_SKIPS[reason]


def named_counts(counts):
    """Returns the names of such weights with their counts, as text: ``fc.weight (2 values)``."""
    return listed([f"{name} ({counted(number, 'value', 'values')})" for name, number in counts.items()], _MOST_NAMES)


def on_unreached(numbers):
    """
    Returns sentences on optimizers to whose weights no gradient flows, given their numbers: None for the only one. It
    is empty if there are none.
    """
    if not numbers:
        return ""
    return f"No gradient reaches any weight{of_optimizers(numbers)}: all are exactly zero. {why_unreached(numbers)}"


def of_optimizers(numbers):
    """Returns whose weights these are, to follow the word: empty for those of the only optimizer."""
    return "" if numbers == [None] else f" of optimizer {' and '.join(map(str, numbers))}"


def why_unreached(numbers):
    """Asks what may be the reason."""
    order = (
        ""
        if numbers == [None]
        else ("Loss i trains the weights of optimizer i: are losses and optimizers in the same order? If so, look for ")
    )
    return (
        f"{order or 'Look for '}ops.stop_gradient between the loss and these weights; or float16 flushes all gradients "
        f"to zero, which a larger loss scale prevents."
    )


def on_not_finite(counts):
    """Returns sentences on such weights, empty if there are none."""
    if not counts:
        return ""
    return (
        f"Weights themselves are infinite or NaN: {named_counts(counts)}. No loss scale and no cell in float32 mends "
        f"that. Go on from a checkpoint in which they are finite, and look for what wrote them: a checkpoint that was "
        f"loaded, or the optimizer (an eps of 1e-8 is 0 in float16)."
    )
