"""Advice where a training goes wrong."""

from ms_lossscale._arguments import listed
from ms_lossscale._words import counted

_MOST_NAMES = 5
_NAN = "A gradient that is NaN at every scale, as behind the root of an exact 0, needs an epsilon under it"
_CELLS = "ms_lossscale.advise_float32 the cells that need float32. A number as the loss scale does not fall."
# What to do about skips, by their reason.
_ON_SKIPS = {
    "condition": "nothing overflows, so look at the condition and its threshold, and leave the loss scale as it is",
    "loss": "no loss scale fixes a loss that is not finite: locate_overflow names the cell where it begins",
    "forward_state": "look at what the forward writes, see forward_state_names(). A normalisation's statistics are not "
    "finite if its input overflows in float16: ms_lossscale.advise_float32 finds the cells that need float32; with NaN "
    "in the data; or if a batch has one sample only, as a dataset's last one may. A value that is infinite on purpose "
    "must be in its Parameter before the first step",
    "gradients": "the backward overflows at every scale so far: find_loss_scale finds a lower one, if there is any, "
    f"and {_CELLS} {_NAN}: locate_overflow names it",
    "gradients of a ManualStep": "the backward overflows at every scale so far, or there is NaN in the data, which "
    "end(grads, loss=loss) would tell: locate_overflow(forward, [inputs]) names where it begins, and "
    f"{_CELLS} {_NAN}",
    "not_begun": "call begin(*inputs) in each step, and run the forward on what it returns, before end(grads)",
    "detector": "all gradients are finite, so look at your overflow detector; or, where an NPU's status register "
    "tells, for values in the network that overflow and are clipped or masked afterwards",
}


def on_skips(reason, is_manual):
    """Returns what to do about steps that are skipped for this reason; `is_manual` for those of a ManualStep."""
    return _ON_SKIPS["gradients of a ManualStep" if is_manual and reason == "gradients" else reason]


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
    order = "Loss i trains the weights of optimizer i: are losses and optimizers in the same order? "
    return (
        f"{'' if numbers == [None] else order}Look for ops.stop_gradient between the loss and these weights; or "
        f"float16 flushes all gradients to zero, which a larger loss scale prevents."
    )


def on_float16_weights(names):
    """Returns sentences on weights that are float16 and trained."""
    return (
        f"These weights are float16: {listed(names, _MOST_NAMES)}. An optimizer gets their gradients in float16, after "
        f"unscaling: what is below 6e-8 is zero, at every loss scale. Keep them in float32, "
        f"weight.set_dtype(mindspore.float32) before the optimizer is constructed, and compute in float16, "
        f"network.to_float(mindspore.float16). Or pass ShardedOptimizer, which trains float32 masters of them, on one "
        f"device, too."
    )


def on_not_finite(counts):
    """Returns sentences on weights with values that are not finite, given these counts by name; empty if none has."""
    if not counts:
        return ""
    names = listed([f"{name} ({counted(number, 'value', 'values')})" for name, number in counts.items()], _MOST_NAMES)
    return (
        f"Weights themselves are infinite or NaN: {names}. No loss scale and no cell in float32 mends "
        f"that. Go on from a checkpoint in which they are finite, and look for what wrote them: a checkpoint that was "
        f"loaded, or the optimizer (an eps of 1e-8 is 0 in float16)."
    )
