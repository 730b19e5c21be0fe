"""A training that only skips: weights that are NaN, say, with which no scale makes finite gradients."""

import warnings

from ms_lossscale._output import LossScaleValues, written_scale

# Calls between two looks, each of which waits for the device; and more steps than a dynamic scale needs to fall.
_CALLS, _SKIPS = 500, 100


class EndlessSkips:
    """
    Warns, once, of a training that skips every step.

    Args:
        owner (str): The training cell's name.
        steps (CellList[Step]): Its steps.
    """

    def __init__(self, owner, steps):
        self._owner = owner
        self._steps = steps
        self._calls = 0
        self._warned = False

    def count_call(self):
        """Before each call."""
        self._calls += 1
        if self._calls % _CALLS == 0 and not self._warned:
            for step in self._steps:
                skips = step.step_counters.as_dict()["consecutive_skipped_steps"]
                if skips >= _SKIPS:
                    self._warned = True
                    self._warn(step, skips)

    def _warn(self, step, skips):
        scales = LossScaleValues(loss_scale.get_loss_scale() for loss_scale in step.loss_scales)
        warnings.warn(
            f"For '{self._owner}', the last {skips} steps were all skipped, now at a loss scale of "
            f"{scales.written()}, so that no weight moves any more: {_cause(step, scales)}",
            RuntimeWarning,
            stacklevel=4,
        )


def _cause(step, scales):
    overflowed = step.step_counters.overflowed_parameters()
    if overflowed:
        loss_scale = scales[step.overflowed_loss_scales(overflowed).index(True)]
        return (
            f"the gradients of {_listed(overflowed)} are not finite. Look for NaN in the weights and in the data: "
            f"ms_lossscale.locate_overflow(cell, inputs, loss_scale={written_scale(loss_scale)}) names where they "
            f"begin."
        )
    # The status register is a detector, too.
    written = step.forward_state.names
    if not written:
        return "all gradients are finite, but the overflow detector reports an overflow. Look for it in the forward."
    return (
        f"all gradients are finite, but what the forward writes ({_listed(written)}) became not finite, or the "
        f"overflow detector reports an overflow. Look at what the forward writes there: a value that is infinite on "
        f"purpose must be in its Parameter before the first step."
    )


def _listed(names):
    return f"{', '.join(names[:3])}{' and others' if names[3:] else ''}"
