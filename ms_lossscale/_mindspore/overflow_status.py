"""MindSpore's own overflow check, and the operators of an NPU's status register, which it does not export."""

from mindspore import ParameterTuple, Tensor, get_context, nn
from mindspore import dtype as mstype
from mindspore.ops.operations.math_ops import NPUClearFloatStatusV2 as NPUClearFloatStatusV2
from mindspore.ops.operations.math_ops import NPUGetFloatStatusV2 as NPUGetFloatStatusV2


class DeviceOverflowCheck(nn.TrainOneStepWithLossScaleCell):
    """
    MindSpore's own overflow check for GPU and Ascend, which knows the kernels and modes of every chip. It is
    `get_overflow_status`, documented for "user-defined training network[s] based on this class", without a network, an
    optimizer or Parameters.

    How a chip is recognised differs between MindSpore versions. The names that this class reads of its base for that
    (`ascend_910b_target`, the environment variable) are the same from 2.7 to 2.10, and a test watches them.
    """

    def __init__(self):
        no_optimizer = nn.Cell()
        no_optimizer.parameters = ParameterTuple(())
        super().__init__(nn.Identity(), no_optimizer, Tensor(1.0))
        del self.scale_sense
        # The training cell itself agrees across ranks, once for all networks.
        self.is_distributed = False
        self._no_status = Tensor([0] * 8, mstype.int32)

    @property
    def saturates(self):
        """Whether `get_overflow_status` would read the NPU's register, by the same conditions."""
        if self.gpu_target:
            return False
        return self.is_ascend_910a or self._ascend_check_overflow_mode == "SATURATION_MODE"

    @property
    def is_ascend_910a(self):
        """Whether the device is the first Ascend 910, which has no other mode."""
        return not (self.gpu_target or self.ascend_910b_target)

    def construct(self, grads):
        return self.get_overflow_status(self._no_status, grads)


def graph_mode_takes_ge():
    """Returns whether graph mode compiles for GE: with jit_level O2, which is the default on an Ascend 910A."""
    if get_context("device_target") != "Ascend":
        return False
    jit_level = get_context("jit_level")
    return jit_level == "O2" or (not jit_level and DeviceOverflowCheck().is_ascend_910a)
