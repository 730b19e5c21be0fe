"""
An NPU in saturation mode, emulated on CPU: one process-wide float-status register, and saturating arithmetic.

On a saturation-mode NPU no tensor shows an overflow: inf becomes 65504, NaN becomes 0. Only the device's one
float-status register shows it, and reading the register clears it. This module does the same without an NPU:

    with emulation.saturation_mode():
        cell = ScaledTrainOneStepCell(emulation.saturate(network), optimizer, DynamicLossScale())
        cell(*inputs)
        print(emulation.register.events)

:class:`ms_lossscale.FloatStatusRegister` runs unchanged: only its two operators are replaced.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Optional, TypeVar

import numpy as np
from mindspore import nn, ops

from ms_lossscale._arguments import describe
from ms_lossscale.overflow_detector import FloatStatusRegister

FLOAT16_MAX = 65504.0
_CONTAINERS = (nn.CellList, nn.CellDict, nn.SequentialCell)

Network = TypeVar("Network", bound=nn.Cell)


class Register:
    """
    The float-status register of the process, and a log of what happened to it.

    Attributes:
        events (list[str]): What happened, in order: ``"clear"``, ``"get 0"`` or ``"get 1"`` (what was read),
            ``"forward NAME"`` and ``"backward NAME"`` (a saturating cell computed).
    """

    def __init__(self) -> None:
        self._status = np.zeros(8, np.int32)
        self.events: list[str] = []

    @property
    def raised(self) -> bool:
        """Whether an overflow occurred since the register was last cleared or read, bool."""
        return bool(self._status.any())

    def raise_status(self) -> None:
        """Sets the register, as an overflow in unrelated work on the same device does."""
        self._status[0] = 1

    def clear(self) -> None:
        """Clears the register."""
        self._status[:] = 0

    def read(self) -> np.ndarray:
        """Reads the register, which clears it. Returns a NumPy array, int32 of shape (8,)."""
        status = self._status.copy()
        self.clear()
        return status


register = Register()


# The functions below run as operators. Like the NPU's, they are not marked as having side effects.


def _get_status(_):
    status = register.read()
    register.events.append(f"get {int(status.any())}")
    return status


def _clear_status(status):
    register.clear()
    register.events.append("clear")
    return status


def _same(argument):
    return argument


def _operator(function, **keywords):
    """Makes an operator whose output has the shape and the dtype of its input."""
    return ops.Custom(function, _same, _same, func_type="pyfunc", **keywords)


@contextlib.contextmanager
def saturation_mode() -> Iterator[Register]:
    """
    A context in which new overflow detectors read the emulated register.

    Inside it, :class:`ms_lossscale.FloatStatusRegister` uses the emulated operators, and a training cell that is
    constructed with ``overflow_detector=None`` chooses it, as on a real NPU in saturation mode. What you construct
    inside the context also works outside. The context begins with a cleared register and an empty log.

    Yields:
        Register, the process-wide one.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from ms_lossscale import FloatStatusRegister, emulation
        >>> with emulation.saturation_mode() as register:
        ...     detector = FloatStatusRegister()
        ...     register.raise_status()
        ...     print(detector(()), detector(()))
        True False
    """
    operators = FloatStatusRegister.operators
    FloatStatusRegister.operators = (partial(_operator, _get_status), partial(_operator, _clear_status))
    register.clear()
    register.events.clear()
    try:
        yield register
    finally:
        FloatStatusRegister.operators = operators


class Saturate(nn.Cell):
    """
    Saturates a tensor to the range of float16 as an NPU does: inf becomes 65504, NaN becomes 0, and either sets the
    register. The gradient that flows back is saturated in the same way.

    Args:
        name (str): Its name in the events. Default: ``"saturate"`` .

    Inputs:
        - **x** (Tensor) - Of any shape, float16 or float32.

    Outputs:
        Tensor, of the shape and dtype of `x`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from ms_lossscale import emulation
        >>> print(emulation.Saturate()(Tensor([1.0, 1e6, float("nan")])))
        [1.0000e+00 6.5504e+04 0.0000e+00]
        >>> emulation.register.raised
        True
    """

    def __init__(self, name: str = "saturate") -> None:
        super().__init__()
        self._backward = _operator(self._saturate(f"backward {name}"))
        self._forward = _operator(self._saturate(f"forward {name}"), bprop=self._bprop)

    @staticmethod
    def _saturate(event):
        def saturate(array):
            register.events.append(event)
            # `not <=` rather than `>`, so that a NaN counts. A float16 that overflowed is inf already.
            if not (np.abs(array) <= FLOAT16_MAX).all():
                register.raise_status()
            return np.clip(np.nan_to_num(array, nan=0.0), -FLOAT16_MAX, FLOAT16_MAX).astype(array.dtype)

        return saturate

    def _bprop(self, _x, _out, dout):
        return (self._backward(dout),)

    def construct(self, x):
        # The operator would get a tensor of shape () as a Python float.
        return self._forward(x.reshape((-1,))).reshape(x.shape)


class _Saturated(nn.Cell):
    """A cell whose outputs, and the gradients that flow into them, saturate."""

    def __init__(self, cell, name):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.saturate = Saturate(name)

    def construct(self, *inputs):
        output = self.cell(*inputs)
        if isinstance(output, tuple):
            saturated = ()
            for tensor in output:
                saturated += (self.saturate(tensor),)
            return saturated
        return self.saturate(output)


def saturate(network: Network, cells: Optional[Sequence[str]] = None) -> Network:
    """
    Makes a network compute on the emulated NPU: the outputs of the named cells, and the gradients that flow back into
    them, saturate and set the register.

    The network is changed in place; its parameters keep their names. Inside a single cell the CPU computes as usual, so
    the gradient of a weight is not saturated.

    Args:
        network (Cell): Any network.
        cells (list[str], optional): Names of the cells, as in `network.cells_and_names()`. If a cell is registered
            under several names, you may give any of them. Default: ``None`` , all cells that have no cells inside, except
            empty containers such as a CellList.

    Returns:
        Cell, the network.

    Raises:
        TypeError: If `network` is not a Cell.
        ValueError: If a name is not that of a cell inside the network.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_lossscale import emulation
        >>> network = emulation.saturate(nn.SequentialCell(nn.Dense(2, 3), nn.ReLU()))
        >>> with emulation.saturation_mode() as register:
        ...     output = network(Tensor(np.full((1, 2), np.inf, np.float32))).asnumpy()
        ...     print(np.isfinite(output).all(), register.raised, register.events)
        True True ['forward 0', 'forward 1']
    """
    if not isinstance(network, nn.Cell):
        raise TypeError(f"For 'saturate', the argument 'network' must be a Cell, but got {describe(network)}.")
    inside = dict(_named_cells(network))
    if cells is None:
        # An empty container computes nothing, and it must stay one that can be iterated over.
        cells = [name for name, cell in inside.items() if not (cell.cells() or isinstance(cell, _CONTAINERS))]
    for name in cells:
        if name not in inside:
            raise ValueError(
                f"For 'saturate', the argument 'cells' must name cells inside the network, but got {name!r}. It has "
                f"{', '.join(inside)}."
            )
    saturated: dict[int, _Saturated] = {}
    for name in cells:
        cell = inside[name]
        saturated.setdefault(id(cell), _Saturated(cell, name))
    for name, cell in inside.items():
        if id(cell) in saturated:
            path, _, attribute = name.rpartition(".")
            _replace(inside[path] if path else network, attribute, saturated[id(cell)])
    return network


def _named_cells(cell, path=""):
    """Yields the names and cells inside; a cell that is registered under several names comes with each of them."""
    # MindSpore's own methods give each cell only once.
    for attribute, child in cell._cells.items():
        if child is not None:
            yield f"{path}{attribute}", child
            yield from _named_cells(child, f"{path}{attribute}.")


def _replace(parent, attribute, cell):
    names = [(parameter, parameter.name) for parameter in cell.get_parameters()]
    if isinstance(parent, (nn.SequentialCell, nn.CellList)):
        parent[int(attribute)] = cell
    else:
        setattr(parent, attribute, cell)
    # Assigning to a cell with auto_prefix has put its prefix before the names once more.
    for parameter, name in names:
        parameter.name = name
