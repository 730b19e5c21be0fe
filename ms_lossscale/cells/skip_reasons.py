"""For which reasons steps were skipped, told from two readings of what counts them."""

from ms_lossscale._mindspore import written_class
from ms_lossscale.overflow_detector import FloatStatusRegister
from ms_lossscale.skip_condition import NormSpike
from ms_lossscale.step.step_counters import REASONS

CONDITION, LOSS, FORWARD_STATE, GRADIENTS, DETECTOR = REASONS


class SkipReasons:
    """Tells, by what is read of a step's counters from time to time, for which reasons it was skipped in between."""

    def __init__(self, step):
        self.counts = step.update.step_counters.skip_reasons
        self._before = self.counts.asnumpy().copy()

    def since_last(self, counts):
        """
        Returns how many steps count for each reason that any counts for, since this was called before, given the counts
        or a copy of them.
        """
        counts = counts.asnumpy().copy()
        number, self._before = counts - self._before, counts
        return {reason: int(its) for reason, its in zip(REASONS, number) if its > 0}


def described_conditions(step):
    """Describes the conditions of a step: ``NormSpike(max_norm=10.0) or HighLoss``."""
    return " or ".join(_described(each.condition) for each in step.update.conditions)


def _described(condition):
    name = written_class(condition).__name__
    if type(condition) is not NormSpike:
        return name
    settings = {"max_norm": condition.max_norm, "z_score": condition.z_score}
    if condition.z_score is not None:
        settings["window"] = condition.window
    return f"{name}({', '.join(f'{its}={value}' for its, value in settings.items() if value is not None)})"


def who_told(step):
    """Says what told of an overflow that neither gradients, nor losses, nor what the forward wrote show."""
    detector = step.forwards_and_backwards.overflow_detector
    if isinstance(detector, FloatStatusRegister):
        return "the status register told of the overflow"
    return f"{written_class(detector).__name__} told of the overflow"
