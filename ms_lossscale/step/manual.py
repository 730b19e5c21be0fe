"""A call whose forward and backward are not the step's own: what its beginning leaves for its end, or the next one."""

import itertools

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._mindspore.graphs import MethodCell, only_if
from ms_lossscale.step.build import build_transaction, check_plan, compiler
from ms_lossscale.step.returned import mean_of

_numbers = itertools.count()


class HeldCall(nn.Cell):
    """
    Holds, in Parameters, the scales of a call, what its forward writes as it was before, and whether the call has begun
    and not ended. They are hidden from MindSpore, and so from checkpoints, which are saved between two calls.
    """

    def __init__(self, forward_state, scales):
        super().__init__(auto_prefix=False)
        # One function may be compiled with several steps, whose Parameters must have names of their own.
        self._name = f"manual_step_{next(_numbers)}."
        self._zero, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        # What Python begins a call with.
        self.token = Tensor(0.0)
        held = (self._state(np.float32(1), f"loss_scale_{i}") for i in range(scales))
        self._hide("scales", ParameterTuple(held))
        # A number, since graph mode would merge a bool constant with the networks' own.
        self._hide("is_open", self._state(np.int32(0), "is_open"))
        self._hide("forward_state", forward_state)
        copies = (self._state(copy, f"copy_{i}") for i, copy in enumerate(forward_state.copied()))
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

    def begin(self, scales, saved):
        """Holds these. Returns what to wait for."""
        copied = gradients.assign(self.copies, saved)
        return copied, gradients.assign(self.scales, scales), prim.assign(self.is_open, self._one)

    def scales_now(self):
        """Returns copies of the scales."""
        return gradients.copy(self.scales)

    def saved(self):
        """Returns what the end of a call restores: what its beginning copied, or nothing if compiled code had none."""
        if len(self.copies) == 0:
            return ()
        return ops.depend(self.copies, only_if(prim.less(self.is_open, self._one), self._keep))

    def _keep(self):
        return gradients.assign(self.copies, self.forward_state.copied()), self.forward_state.keep_for_cycle()

    def end(self, after):
        """Ends the call once `after` is computed. Returns it."""
        return ops.depend(after, prim.assign(self.is_open, ops.depend(self._zero, after)))


class ManualCalls(nn.Cell):
    """A transaction whose networks the user's code runs, and how a call of it begins and ends."""

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        check_plan(plan)
        self.transaction = build_transaction(plan)
        self.networks_run = nn.CellList(list(plan.networks), auto_prefix=False)
        self.in_one_graph = compiler(plan, self.transaction.overflow_check.detector)
        flush = None
        if self.transaction.cycle is not None:
            flush = self.in_one_graph(MethodCell(self.transaction.flush).construct)
        # Hidden from MindSpore: these have the same Parameters again.
        object.__setattr__(self, "held", HeldCall(self.transaction.forward_state, len(plan.loss_scales)))
        object.__setattr__(self, "flush_cycle", flush)

    def begin(self, *inputs):
        """Events 1 and 2 of a step, and the clearing of an NPU's register. Undoes a call that did not end."""
        inputs = ops.depend(self.transaction.use_parameters(inputs), self.held.give_up())
        scales, inputs, saved = self.transaction.begin(inputs)
        inputs = ops.depend(inputs, self.held.begin(scales, saved))
        overflow_check = self.transaction.overflow_check
        return overflow_check.detector.start(inputs) if overflow_check.starts else inputs

    def end(self, grads, losses, loss_weights):
        """
        Events 4 to 9 of a step, given the scaled gradients of all optimizers, the loss, if it is known, and its weight,
        if it is a sum: tuples of one Tensor, or empty.
        """
        grads = self.transaction.use_parameters(grads)
        if len(losses) > 0 and len(loss_weights) > 0:
            losses = (mean_of(losses[0], loss_weights[0]),)
        call = {"scales": self.held.scales_now(), "losses": losses, "gradients": grads}
        if len(self.held.copies) > 0:
            call["saved"] = self.held.saved()
        if len(loss_weights) > 0:
            call["loss_weights"] = loss_weights * len(grads)
        return self.held.end(self.transaction.end_of_call(call))
