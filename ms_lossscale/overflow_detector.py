"""Overflow detectors, which tell a training cell whether a step overflowed."""

from mindspore import Tensor, get_context, ops
from mindspore import dtype as mstype
from mindspore.ops.operations.math_ops import NPUClearFloatStatusV2, NPUGetFloatStatusV2

from ms_lossscale import _gradients as gradients
from ms_lossscale._mindspore import DeviceOverflowCheck, Float32Cell


class OverflowDetector(Float32Cell):
    """
    Base class of the overflow detectors. A subclass looks for the overflow in its `construct`.

    A training cell calls :meth:`start` before the forward, and the detector itself after all gradients of all networks
    that share the check. When accumulating, it is called once in each call; in the last call of a cycle, it gets the
    sum over the cycle.

    Inputs:
        - **grads** (tuple[Tensor]) - The unscaled gradients of all networks that share the check, float32, one flat
          tuple.

    Outputs:
        Tensor, whether anything overflowed, bool of shape :math:`()`. Training cells also accept a single element of
        any shape and dtype.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def start(self, inputs: tuple) -> tuple:
        """
        Ties to the inputs whatever must happen before the forward.

        Args:
            inputs (tuple): The inputs of the step.

        Returns:
            tuple, the same inputs.
        """
        return inputs

    def construct(self, grads):
        raise NotImplementedError


class FiniteGradients(OverflowDetector):
    """
    Looks for infinities and NaNs in the gradients. This is right on CPU, on GPU, and on an NPU in inf-nan mode.

    On GPU and Ascend it uses the check of :class:`mindspore.nn.TrainOneStepWithLossScaleCell`, with the fused kernels
    of the device.

    Inputs and outputs are those of :class:`OverflowDetector`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_lossscale import FiniteGradients
        >>> detector = FiniteGradients()
        >>> detector((Tensor([1.0, 2.0]), Tensor([float("nan")])))
        Tensor(shape=[], dtype=Bool, value= True)
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_cpu = get_context("device_target") == "CPU"
        if not self._on_cpu:
            self._device_check = DeviceOverflowCheck()

    def construct(self, grads):
        if self._on_cpu:
            return ops.logical_not(gradients.finite(grads))
        return self._device_check(grads)


class FloatStatusRegister(OverflowDetector):
    """
    Reads the float-status register of an NPU. In saturation mode nothing else shows an overflow, because inf becomes
    65504 and NaN becomes 0 before a gradient could show it.

    There is one register for the whole device, and reading it consumes its value. It is therefore cleared after all
    earlier work and before the forward, read once after ALL gradients, and cleared again.

    Inputs and outputs are those of :class:`OverflowDetector`. The values of the gradients do not matter: they only make
    sure that the register is read after all of them are computed.

    Supported Platforms:
        ``Ascend``
    """

    # The classes of the operators that read and clear the register. `ms_lossscale.emulation` replaces them.
    operators = (NPUGetFloatStatusV2, NPUClearFloatStatusV2)

    def __init__(self) -> None:
        super().__init__()
        make_get_status, make_clear_status = self.operators
        self._get_status = make_get_status()
        self._clear_status = make_clear_status()
        # The operators require an input of this form, but ignore its values.
        self._no_status = Tensor([0] * 8, mstype.int32)

    # Neither operator is marked as having a side effect. So only ops.depend keeps them in order, and a clear whose
    # result is not used would be dropped as dead code.

    def start(self, inputs: tuple) -> tuple:
        cleared = self._clear_status(ops.depend(self._no_status, inputs))
        return ops.depend(inputs, cleared)

    def construct(self, grads):
        status = self._get_status(ops.depend(self._no_status, grads))
        cleared = self._clear_status(ops.depend(self._no_status, status))
        overflow = ops.ReduceAny()(ops.not_equal(status, self._no_status))
        return ops.depend(overflow, cleared)


class NoCheck(OverflowDetector):
    """Never finds an overflow: it is for loss scales with `drop_overflow_update=False`."""

    def __init__(self) -> None:
        super().__init__()
        self._zero = Tensor(0, mstype.int32)

    def construct(self, grads):
        # Like any answer, it comes after the gradients, so that the update of the scale does not overtake them.
        return gradients.never(ops.depend(self._zero, grads))


def default_overflow_detector():
    """Returns the detector for the device and its mode."""
    emulated = FloatStatusRegister.operators != (NPUGetFloatStatusV2, NPUClearFloatStatusV2)
    if emulated or (get_context("device_target") == "Ascend" and DeviceOverflowCheck().saturates):
        return FloatStatusRegister()
    return FiniteGradients()
