"""A call whose forward and backward are not the step's own: what its beginning leaves for its end, or the next one."""

import itertools

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore.graphs import of_each_call, only_if
from ms_lossscale.step.build import check_networks, compiler
from ms_lossscale.step.returned import mean_of
from ms_lossscale.step.settings import CallOfMethod
from ms_lossscale.step.transaction import Transaction

_numbers = itertools.count()


class HeldCall(nn.Cell):
    """
    Holds, in Parameters, the scale of a call, what its forward writes as it was before, and whether the call has begun
    and not ended. They are hidden from MindSpore, and so from checkpoints, which are saved between two calls.
    """

    def __init__(self, forward_state, scale_shape):
        super().__init__(auto_prefix=False)
        # One function may be compiled with several steps, whose Parameters must have names of their own.
        self._name = f"manual_step_{next(_numbers)}."
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        # What Python begins a call with.
        self.token = Tensor(0.0)
        self._hide("scale", self._state(np.ones(scale_shape, np.float32), "loss_scale"))
        # A number, since graph mode would merge a bool constant with the networks' own.
        self._hide("is_open", self._state(np.int32(0), "is_open"))
        self._hide("forward_state", forward_state)
        copies = (self._state(ops.deepcopy(its), f"copy_{i}") for i, its in enumerate(forward_state.written))
        self._hide("copies", ParameterTuple(copies))

    def _hide(self, name, value):
        object.__setattr__(self, name, value)

    def _state(self, value, name):
        return Parameter(Tensor(value), name=f"{self._name}{name}", requires_grad=False)

    def give_up(self):
        """Undoes a call that began and did not end. Returns what to wait for."""
        # MindSpore can't run a branch that does nothing ("Invalid exit actor").
        if len(self.copies) == 0:
            return self._zero
        return only_if(prim.greater(self.is_open, self._zero), self.forward_state.restore_call, self.copies)

    def begin(self, scale, saved):
        """Holds these. Returns what to wait for."""
        copied = gradients.assign(self.copies, saved)
        return copied, prim.assign(self.scale, scale), prim.assign(self.is_open, self._one)

    def saved(self):
        """Returns what the end of a call restores: what its beginning copied, or nothing if compiled code had none."""
        if len(self.copies) == 0:
            return ()
        return ops.depend(self.copies, only_if(prim.less(self.is_open, self._one), self._keep))

    def _keep(self):
        return gradients.assign(self.copies, self.forward_state.written), self.forward_state.keep_for_cycle()

    def end(self, after):
        """Ends the call once `after` is computed. Returns it."""
        return ops.depend(after, prim.assign(self.is_open, ops.depend(self._zero, after)))


class BeginCall(nn.Cell):
    """Events 1 and 2 of a step, and the clearing of an NPU's register. It undoes a call that began and did not end."""

    def __init__(self, transaction, held):
        super().__init__(auto_prefix=False)
        self.transaction, self.held = transaction, held
        self.use_parameters = UseInOutermostGraph(list(transaction.get_parameters()))

    def construct(self, *inputs):
        inputs = ops.depend(self.use_parameters(inputs), self.held.give_up())
        scale, inputs, saved = self.transaction.begin(inputs)
        inputs = ops.depend(inputs, self.held.begin(scale, saved))
        return self.transaction.detector.start(inputs) if self.transaction.overflow_check.starts else inputs


class EndCall(nn.Cell):
    """
    Events 4 to 9 of a step, given the scaled gradients of all optimizers, the loss, if it is known, and its weight, if
    it is a sum: tuples of one Tensor, or empty.
    """

    def __init__(self, transaction, held):
        super().__init__(auto_prefix=False)
        self.transaction, self.held = transaction, held
        self._optimizers = len(transaction.optimizers.optimizers)
        self.use_parameters = UseInOutermostGraph(list(transaction.get_parameters()))

    def __call__(self, *inputs):
        return super().__call__(*of_each_call(inputs))

    def construct(self, grads, losses, weights):
        grads = self.use_parameters(grads)
        if len(losses) > 0 and len(weights) > 0:
            losses = (mean_of(losses[0], weights[0]),)
        scale, saved = prim.deepcopy(self.held.scale), self.held.saved()
        ended = self.transaction.end_of_call(grads, losses, weights * self._optimizers, scale, saved)
        return self.held.end(ended)


class ManualCalls(nn.Cell):
    """A transaction whose networks the user's code runs, and how a call of it begins and ends."""

    def __init__(self, owner, networks, optimizers, loss_scales, settings, ranks):
        super().__init__(auto_prefix=False)
        check_networks(owner, networks, loss_scales, settings)
        self.transaction = Transaction(owner, networks, optimizers, loss_scales, settings, ranks, is_manual=True)
        self.forwards_and_backwards = nn.CellList(list(networks), auto_prefix=False)
        its = HeldCall(self.transaction.forward_state, self.transaction.scale_shape)
        compiled, flush = compiler(optimizers, self.transaction, settings), None
        if settings.gradient_accumulation_steps > 1:
            flush = compiled(CallOfMethod(self.transaction.flush).construct)
        begin, end = BeginCall(self.transaction, its), EndCall(self.transaction, its)
        parts = {"held": its, "begin": begin, "end": end, "_flush": flush}
        parts.update(run_begin=compiled(begin.construct), run_end=compiled(end.construct))
        # Hidden from MindSpore: these have the same Parameters again.
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def flush(self):
        """Ends a cycle that has begun. Returns whether it overflowed, a bool Tensor, or None if none has begun."""
        return self._flush() if self.transaction.has_begun() else None
