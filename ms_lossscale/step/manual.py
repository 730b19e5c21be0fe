"""A call whose forward and backward are not the step's own: what its beginning leaves for its end, or the next one."""

import itertools

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._mindspore.graphs import only_if
from ms_lossscale.step.accumulation import compiled_flush
from ms_lossscale.step.build import build_transaction, check_plan, compiler
from ms_lossscale.step.returned import mean_of

_numbers = itertools.count()
# How many skipped steps in a row compiled code tells of, and more than there ever are.
_TOLD_SKIPS, _NEVER = 50, 2**31 - 1


class HeldCall(nn.Cell):
    """
    Holds, in Parameters, the scales of a call, what its forward writes as it was before, and whether the call has begun
    and not ended; and, for all calls, how many skipped steps in a row are told. They are hidden from MindSpore, and so
    from checkpoints, which are saved between two calls.
    """

    def __init__(self, plan, forward_state):
        super().__init__(auto_prefix=False)
        # One function may be compiled with several steps, whose Parameters must have names of their own.
        self._name = f"{plan.prefix}manual_step_{next(_numbers)}."
        self._one = Tensor(1, mstype.int32)
        self.zero = Tensor(0, mstype.int32)
        self.never = Tensor(_NEVER, mstype.int32)
        # What Python begins a call with.
        self.token = Tensor(0.0)
        scales = (self._state(f"loss_scale_{i}", np.float32(1)) for i in range(len(plan.loss_scales)))
        copies = (self._state(f"copy_{i}", copy) for i, copy in enumerate(forward_state.copied()))
        self._hide("scales", ParameterTuple(scales))
        self._hide("copies", ParameterTuple(copies))
        # A number, since graph mode would merge a bool constant with the networks' own.
        self._hide("is_open", self._state("is_open", np.int32(0)))
        self._hide("tells_at", self._state("tells_at", np.int32(_TOLD_SKIPS)))

    def _hide(self, name, value):
        object.__setattr__(self, name, value)

    def _state(self, name, value):
        return Parameter(Tensor(value), name=f"{self._name}{name}", requires_grad=False)

    def begin(self, scales, saved):
        """Holds these. Returns what to wait for."""
        copied = gradients.assign(self.copies, saved)
        return copied, gradients.assign(self.scales, scales), prim.assign(self.is_open, self._one)


class ManualCalls(nn.Cell):
    """A transaction whose networks the user's code runs, and how a call of it begins and ends."""

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        check_plan(plan)
        self.transaction = build_transaction(plan)
        self.networks_run = nn.CellList(list(plan.networks), auto_prefix=False)
        self.in_one_graph = compiler(plan, self.transaction.overflow_check.detector)
        self._print = ops.Print()
        self._told = (
            f"For '{plan.owner}'{f' {plan.prefix[:-1]!r}' if plan.prefix else ''}, the last {_TOLD_SKIPS} steps were "
            f"skipped, so that no weight changes any more. Its skip_reasons() and overflowed_parameters() say why. "
            f"Symptoms and causes: docs/diagnosis.md."
        )
        # Hidden from MindSpore: these have the same Parameters again.
        object.__setattr__(self, "held", HeldCall(plan, self.transaction.forward_state))
        object.__setattr__(self, "flush_cycle", compiled_flush(self.transaction, self.in_one_graph))

    def begin(self, *inputs):
        """Events 1 and 2 of a step, and the clearing of an NPU's register. Undoes a call that did not end."""
        inputs = ops.depend(inputs, self.transaction._all_parameters)
        # MindSpore can't run a branch that does nothing ("Invalid exit actor").
        inputs = ops.depend(inputs, self._give_up()) if len(self.held.copies) > 0 else inputs
        scales, inputs, saved = self.transaction.begin(inputs)
        inputs = ops.depend(inputs, self.held.begin(scales, saved))
        overflow_check = self.transaction.overflow_check
        return overflow_check.detector.start(inputs) if overflow_check.starts else inputs

    def _give_up(self):
        is_open = prim.greater(self.held.is_open, self.held.zero)
        return only_if(is_open, self.transaction.forward_state.restore_call, self.held.copies)

    def end(self, grads, losses, loss_weights):
        """
        Events 4 to 9 of a step, given the scaled gradients of all optimizers, the loss, if it is known, and its weight,
        if it is a sum: tuples of one Tensor, or empty.
        """
        return self._ended(ops.depend(grads, self.transaction._all_parameters), losses, loss_weights)

    def end_if_begun(self, grads, losses, loss_weights):
        """
        The same for compiled code, in which no Python looks after a step: a call that has not begun only counts as a
        skipped step, and many skipped steps in a row are told once.
        """
        held = self.held
        counters = self.transaction.counters
        grads = ops.depend(grads, self.transaction._all_parameters)
        not_begun = prim.equal(held.is_open, held.zero)
        skipped = counters.count_not_begun(not_begun) if not_begun else self._ended(grads, losses, loss_weights)
        tells = prim.greater_equal(counters.consecutive_skipped_steps, held.tells_at)
        return self._tell(skipped) if tells else skipped

    def _tell(self, skipped):
        self._print(self._told)
        return ops.depend(skipped, prim.assign(self.held.tells_at, self.held.never))

    def _ended(self, grads, losses, loss_weights):
        held = self.held
        call = {"scales": held.scales, "losses": losses, "gradients": grads}
        if len(held.copies) > 0:
            call["saved"] = held.copies
        prim.assign(held.is_open, held.zero)
        return self.transaction.end_of_call(_weighted(call, loss_weights) if len(loss_weights) > 0 else call)


def _weighted(call, loss_weights):
    """Adds to a call the weight of its loss, a tuple of one Tensor: a mean, if the loss is that of a sum."""
    call["loss_weights"] = loss_weights * len(call["gradients"])
    if len(call["losses"]) > 0:
        call["losses"] = (mean_of(call["losses"][0], loss_weights[0]),)
    return call
