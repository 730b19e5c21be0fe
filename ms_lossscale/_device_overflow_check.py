"""MindSpore's own overflow check for GPU and Ascend, which knows the kernels and the modes of every chip."""

from mindspore import ParameterTuple, Tensor, nn
from mindspore import dtype as mstype


class _NoOptimizer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.parameters = ParameterTuple(())


class DeviceOverflowCheck(nn.TrainOneStepWithLossScaleCell):
    """
    `get_overflow_status` of MindSpore's cell, documented for "user-defined training network[s] based on this class",
    without a network, an optimizer or Parameters.

    How a chip is recognised changes between MindSpore versions. What this class reads of its base to learn it
    (`ascend_910b_target`, the environment variable) has had the same names from 2.7 to 2.10, and a test watches them.
    """

    def __init__(self):
        super().__init__(nn.Identity(), _NoOptimizer(), Tensor(1.0))
        del self.scale_sense
        # The training cell agrees on the verdict across ranks itself, once for all networks.
        self.is_distributed = False
        self._no_status = Tensor([0] * 8, mstype.int32)

    @property
    def saturates(self):
        """Whether `get_overflow_status` would read the NPU's register: the choice that it makes itself."""
        if self.gpu_target:
            return False
        return not self.ascend_910b_target or self._ascend_check_overflow_mode == "SATURATION_MODE"

    def construct(self, grads):
        return self.get_overflow_status(self._no_status, grads)
