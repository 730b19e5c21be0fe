"""How many steps were applied and skipped."""

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype


class StepCounters(nn.Cell):
    """
    Counts applied, skipped, and consecutively skipped steps in int32 Parameters.

    Args:
        prefix (str): For the Parameters' names.
    """

    def __init__(self, prefix):
        super().__init__(auto_prefix=False)
        self.applied_steps = self._counter(prefix, "applied_steps")
        self.skipped_steps = self._counter(prefix, "skipped_steps")
        self.consecutive_skipped_steps = self._counter(prefix, "consecutive_skipped_steps")

    @staticmethod
    def _counter(prefix, name):
        return Parameter(Tensor(0, mstype.int32), name=f"{prefix}step_counters.{name}", requires_grad=False)

    def count_applied(self):
        ops.assign(self.consecutive_skipped_steps, Tensor(0, mstype.int32))
        ops.assign(self.applied_steps, self.applied_steps + 1)
        return self.applied_steps

    def count_skipped(self):
        ops.assign(self.consecutive_skipped_steps, self.consecutive_skipped_steps + 1)
        ops.assign(self.skipped_steps, self.skipped_steps + 1)
        return self.skipped_steps

    def as_dict(self):
        """The counts as ints, by name."""
        return {
            name: int(getattr(self, name).asnumpy())
            for name in ("applied_steps", "skipped_steps", "consecutive_skipped_steps")
        }
