"""Notices that a ManualStep ends, although no loss has gone through its `scale`."""

from ms_lossscale._user_warnings import warn_user
from ms_lossscale.loss_scale import FixedLossScale


class UnscaledLosses:
    """Knows by which of the loss scales of a ManualStep no loss has been multiplied yet."""

    def __init__(self, owner, loss_scales):
        self._owner = owner
        self._are_several = len(loss_scales) > 1
        self._missing = {
            i for i, its in enumerate(loss_scales) if type(its) is not FixedLossScale or its.get_loss_scale() != 1
        }

    def note_scaled(self, number):
        """Takes note of a loss that is multiplied by the scale of optimizer `number`, which it returns."""
        self._missing.discard(number if self._are_several else 0)
        return number

    def notice(self):
        """Warns once of each loss scale that is missing when a step ends. Returns True."""
        for number in sorted(self._missing):
            of, argument = (f" of optimizer {number}", f", {number}") if self._are_several else ("", "")
            warn_user(
                f"For '{self._owner}', no loss{of} has gone through 'scale' before the first 'end', which divides the "
                f"gradients by the loss scale all the same. Differentiate step.scale(loss{argument}), and not the "
                f"loss. If you multiply it by 'scale_sense' yourself, all is well."
            )
        self._missing.clear()
        return True
