"""
What the parts of a step hand to each other, by name.

A record is a dict: graph mode follows its keys when it compiles, so that names cost nothing. A NamedTuple or a
dataclass would be made by the Python interpreter in every step. What a step does not know is not in it, and graph mode
leaves out the code after `if "name" in record`. In PyNative mode a record goes into a compiled part as a whole.

Gradients are a tuple for each network, of a Tensor for each of its weights. Scales, and flags of scales, are a tuple of
scalars: one if the networks share a loss scale, else one for each network.
"""

from typing import TypedDict

from mindspore import Tensor

Gradients = tuple[tuple[Tensor, ...], ...]


class Call(TypedDict, total=False):
    """What a call has run."""

    # The loss scales that it used, float32 of shape ().
    scales: tuple[Tensor, ...]
    # What the forward writes, as it was before; missing if it writes nothing.
    saved: tuple[Tensor, ...]
    # The losses, of any shape, one for each network; of a ManualStep the one that is passed to `end`, or none. At the
    # end of a cycle the sum of their means over its calls.
    losses: tuple[Tensor, ...]
    # The scaled gradients; missing at the end of a cycle.
    gradients: Gradients
    # The weight of each network's loss, float32 of shape (); missing if no loss has one.
    loss_weights: tuple[Tensor, ...]
    # What the conditions were asked, the loss and the norm, and whether one `skips`, of shape (); missing without any.
    asked: dict[str, Tensor]
    # True in the compiled code of a ManualStep, after which no Python looks; missing elsewhere.
    is_watched: bool
    # Where a call that has not begun runs like others and is then skipped: whether it is one, bool of shape (), and the
    # norms as they were before it; missing elsewhere.
    not_begun: Tensor
    norms: tuple[Tensor, ...]


class Found(TypedDict, total=False):
    """What a look at gradients has found, bools of shape () but for `finite`."""

    overflowed: Tensor
    # For each loss scale, whether a gradient that it scaled is not finite; missing if not looked at.
    not_finite: tuple[Tensor, ...]
    # As in a verdict.
    finite: tuple[Tensor, ...]


class Verdict(TypedDict, total=False):
    """What a check has found, bools of shape ()."""

    # For each loss scale, whether there was an overflow that counts for it.
    overflows: tuple[Tensor, ...]
    # Whether each gradient is finite, bools of shape (n,): for each loss scale those that it scaled, or one for all
    # gradients; missing if not looked at.
    finite: tuple[Tensor, ...]
    # For each network, whether the weight of its loss is negative, infinite or NaN; missing if there are no weights.
    impossible_weights: tuple[Tensor, ...]
    # Whether what the forward wrote was finite before, and is no longer; missing if it writes nothing.
    state_not_finite: Tensor
    # For each loss scale, whether its update rule sees an overflow; missing if it sees `overflows`.
    seen_by_rules: tuple[Tensor, ...]


class Flags(TypedDict, total=False):
    """What an accumulation cycle keeps of what was found in a call, bools."""

    overflows: tuple[Tensor, ...]
    # Whether a loss, and whether what the forward wrote, was not finite.
    causes: tuple[Tensor, Tensor]
    # For each loss scale, whether the forward's own overflow keeps it from falling; empty if none can.
    forward_failed: tuple[Tensor, ...]
    # Where calls are dropped, whether this one is not, and whose gradients are not finite, of shape (n,).
    kept: Tensor
    not_finite: Tensor
