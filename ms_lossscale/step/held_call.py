"""A call whose forward and backward are not the step's own: what its beginning leaves for its end, or the next one."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore import forget_compiled, only_if
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.stage import ForwardState
from ms_lossscale.step.step import Step


class OwnForward(nn.Cell):
    """Stands in a step for the forward and backward that the user's code makes between its beginning and its end."""

    def __init__(self, networks: Sequence[nn.Cell], packing: Packing, overflow_detector: OverflowDetector) -> None:
        super().__init__(auto_prefix=False)
        self.networks = nn.CellList(list(networks), auto_prefix=False)
        self.packing = packing
        self.overflow_detector = overflow_detector


class StepBegunError(RuntimeError):
    """A function that is to be looked into begins a step."""


class HeldCall(nn.Cell):
    """
    Holds, in Parameters, the scale of a call, what its forward writes as it was before, and whether the call has begun
    and not ended.
    """

    def __init__(self, forward_state: ForwardState, scale_shape: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self._forward_state = forward_state
        # Hidden from MindSpore, and so from checkpoints, which are saved between two calls.
        self._hide("scale", _state(np.ones(scale_shape, np.float32), "loss_scale"))
        self._hide("is_open", _state(False, "is_open"))
        self._yes, self._no = Tensor(True), Tensor(False)
        # What Python begins a call with.
        self.token = Tensor(0.0)
        self._hide("is_looked_into", False)
        self.fit()
        _ALL.add(self)

    def _hide(self, name, value):
        object.__setattr__(self, name, value)

    def look_into(self, is_looked_into):
        self._hide("is_looked_into", is_looked_into)

    def refuse_if_looked_into(self):
        """Raises if only the forward of a step may run."""
        if self.is_looked_into:
            _refuse()

    def fit(self):
        """Makes room for what the forward writes now: state may appear after the first call."""
        written = self._forward_state.written
        copies = (_state(ops.deepcopy(its), f"copy_{i}") for i, its in enumerate(written))
        self._hide("copies", ParameterTuple(copies))

    def fits(self):
        return len(self.copies) == len(self._forward_state.written)

    def begin(self, scale, saved):
        """Holds these. Returns what to wait for."""
        copied = gradients.assign(self.copies, saved)
        return copied, prim.assign(self.scale, scale), prim.assign(self.is_open, self._yes)

    def end(self, after):
        """Ends the call once `after` is computed. Returns it."""
        return ops.depend(after, prim.assign(self.is_open, ops.depend(self._no, after)))


def _refuse():
    raise StepBegunError(
        "a function that is looked into must not make a step. Pass the function that is differentiated, forward(x, y), "
        "and not the one that calls 'begin' and 'end'."
    )


_refuse_when_compiled = ops.constexpr(_refuse, check=False)


# Those that exist: which of them a function uses, only running it shows.
_ALL: "weakref.WeakSet[HeldCall]" = weakref.WeakSet()


@contextlib.contextmanager
def looking_into() -> Iterator[None]:
    """
    A context in which functions are run to look into them. A loss that they scale stays as it is, and beginning a step
    is an error.
    """
    held = list(_ALL)
    scales = [ops.deepcopy(each.scale) for each in held]
    try:
        for each in held:
            prim.assign(each.scale, ops.ones_like(each.scale))
            each.look_into(True)
        yield
    finally:
        for each, scale in zip(held, scales):
            prim.assign(each.scale, scale)
            each.look_into(False)


def _state(value, name):
    return Parameter(Tensor(value), name=f"manual_step.{name}", requires_grad=False)


class BeginCall(nn.Cell):
    """Events 1 and 2 of a step, and the clearing of an NPU's register. It undoes a call that began and did not end."""

    def __init__(self, step: Step, held: HeldCall) -> None:
        super().__init__(auto_prefix=False)
        self.step = step
        self.held = held
        self.use_parameters = UseInOutermostGraph(list(step.get_parameters()))

    def construct(self, *inputs):
        if self.held.is_looked_into:
            _refuse_when_compiled()
        # MindSpore can't run a branch that does nothing ("Invalid exit actor").
        if len(self.held.copies) > 0:
            undone = only_if(self.held.is_open, self.step.forward_state.restore_call, self.held.copies)
            inputs = ops.depend(inputs, undone)
        scale, inputs, saved = self.step.begin(self.use_parameters(inputs))
        inputs = ops.depend(inputs, self.held.begin(scale, saved))
        return self.step.forwards_and_backwards.overflow_detector.start(inputs)


class EndCall(nn.Cell):
    """
    Events 4 to 9 of a step, given its scale, the scaled gradients of all optimizers, the loss, if it is known, and its
    weight, if it is a sum: tuples of one Tensor, or empty.
    """

    def __init__(self, step: Step, held: HeldCall) -> None:
        super().__init__(auto_prefix=False)
        self.step = step
        self.held = held
        self.use_parameters = UseInOutermostGraph(list(step.get_parameters()))

    def construct(self, scale, grads, losses, weights):
        grads = self.step.forwards_and_backwards.packing.pack(self.use_parameters(grads))
        of_each = weights * len(self.step.update.optimizers.optimizers)
        overflow = self.step.end(grads, losses, of_each, scale, self.held.copies)
        return self.held.end(overflow)


class ManualStages:
    """How a call begins and ends: cells for compiled code, and what Python calls."""

    def __init__(self, held: HeldCall, begin: BeginCall, end: EndCall, compiled: Callable[[nn.Cell], nn.Cell]) -> None:
        self.held = held
        self.begin, self.end = begin, end
        self._compiled = compiled
        self.run_begin, self.run_end = compiled(begin), compiled(end)

    def fit(self) -> None:
        """Takes in what the forward writes by now. Nothing that was compiled before knows of it."""
        if not self.held.fits():
            self.held.fit()
            for part in (self.begin, self.end):
                forget_compiled(part)
            self.run_begin, self.run_end = self._compiled(self.begin), self._compiled(self.end)
