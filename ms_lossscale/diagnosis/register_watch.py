"""Finds the cell in which an NPU's status register is raised though no value shows an overflow."""

import contextlib
from typing import NamedTuple, Optional

from ms_lossscale._output import written_scale
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.cell_watch import CellWatch
from ms_lossscale.overflow_detector import FloatStatusRegister, default_overflow_detector

# A scale at which gradients nearly vanish: what raises the register even here is no overflow.
_TINY = 2.0**-24


def register_of(network):
    """Returns the detector that reads the register when the network trains, None if none does."""
    detectors = [default_overflow_detector()]
    if isinstance(network, TrainingCell):
        detectors = [step.forwards_and_backwards.overflow_detector for step in network.steps]
    return next((each for each in detectors if isinstance(each, FloatStatusRegister)), None)


@contextlib.contextmanager
def cleared_afterwards(detector):
    """A context after which the register is down, if there is one: what a replay has raised is no training's."""
    try:
        yield
    finally:
        if detector is not None:
            detector(()).asnumpy()


class Raised(NamedTuple):
    """
    Where the register was raised first: ``"forward"`` or ``"backward"`` , and the cell's name. `tiny` is the loss scale
    at which it is raised there, too, None if it is not.
    """

    direction: str
    cell: str
    tiny: Optional[float]

    def remark(self):
        """Says what it means, and what a user can do."""
        if self.direction == "forward":
            reason = (
                "Either a value inside this cell overflows, though none that it puts out, or an operator of it raises "
                "the register itself. Try the cell in float32 first."
            )
        elif self.tiny is None:
            return (
                f"At loss scale {written_scale(_TINY)} it stays down, so a value inside this cell overflows, though "
                f"none that it passes back: a smaller loss scale (min_loss_scale) or this cell in float32 prevents it."
            )
        else:
            reason = (
                f"So it is at loss scale {written_scale(self.tiny)}, at which gradients nearly vanish: no value "
                f"overflows, an operator of this cell raises the register itself, at every scale."
            )
        return (
            f"{reason} What you can do: use another operator there; report it to the vendor of the device; or, at your "
            f"own risk, pass overflow_detector=FiniteGradients(), to which a real overflow in saturation mode does not "
            f"show."
        )


def raised_in(loss_and_grads, detector, loss_scale, batch):
    """Runs a batch, within `replay`. Returns where the register is raised first, None if it stays down."""
    found = _RegisterWatch(loss_and_grads, detector).run(loss_scale, batch)
    if found is None:
        return None
    tiny = min(_TINY, loss_scale)
    again = _RegisterWatch(loss_and_grads, detector).run(tiny, batch)
    return Raised(*found, tiny if again == found else None)


class _RegisterWatch:
    """Reads the register, which clears it, before and after each cell."""

    def __init__(self, loss_and_grads, detector):
        self._loss_and_grads = loss_and_grads
        self._detector = detector
        part = loss_and_grads.part
        self._root = part.cell_names()[id(part.network)]
        self._owners = part.owners()
        # The cells that are running, outermost first: forward, or later backward.
        self._running, self._direction = [], "forward"
        self._found = None

    def run(self, loss_scale, batch):
        """Returns the direction and the name of the cell, None if the register stays down."""
        watch = CellWatch(
            self._loss_and_grads.part,
            self._after_forward,
            self._before_backward,
            self._after_backward,
            lambda weight: self._read(self._owners.get(id(weight), self._root)),
            self._before_forward,
        )
        self._detector(())
        with watch.watching():
            self._loss_and_grads.in_pynative(loss_scale, batch)
        self._read(self._innermost())
        self._loss_and_grads.restore()
        return self._found

    def _innermost(self):
        return self._running[-1] if self._running else self._root

    def _read(self, cell):
        """Notes that it is this cell's doing if the register is up."""
        if self._detector(()).asnumpy() and self._found is None:
            self._found = self._direction, cell

    def _before_forward(self, cell):
        self._read(self._innermost())
        self._running.append(cell)

    def _after_forward(self, place, _tensor, _inputs):
        self._read(place.cell)
        self._end(place.cell)

    def _before_backward(self, place, _gradient):
        if self._direction == "forward":
            self._read(self._root)
            self._running, self._direction = [], "backward"
        self._read(self._innermost())
        self._running.append(place.cell)

    def _after_backward(self, place, _gradient):
        self._read(place.cell)
        self._end(place.cell)

    def _end(self, cell):
        if cell in self._running:
            last = len(self._running) - 1 - self._running[::-1].index(cell)
            del self._running[last:]
