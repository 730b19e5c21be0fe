"""A call whose forward and backward are not the step's own: what its beginning leaves for its end, or the next one."""

import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale._values import numbered, state
from ms_lossscale.step.accumulation import compiled_flush
from ms_lossscale.step.build import build_transaction, check_plan, compiler
from ms_lossscale.step.returned import mean_of


class HeldCall(nn.Cell):
    """
    Holds, in Parameters, the scales of a call, and what its forward writes as it was before. They are hidden from
    MindSpore, and so from checkpoints, which are saved between two calls.
    """

    def __init__(self, plan, forward_state):
        super().__init__(auto_prefix=False)
        name = numbered(f"{plan.prefix}held")
        # What Python begins a call with.
        self.token = Tensor(0.0)
        scales = (state(f"{name}.loss_scale_{i}", np.float32(1)) for i in range(len(plan.loss_scales)))
        copies = (state(f"{name}.copy_{i}", copy) for i, copy in enumerate(forward_state.copied()))
        object.__setattr__(self, "scales", ParameterTuple(scales))
        object.__setattr__(self, "copies", ParameterTuple(copies))

    def hold(self, scales, saved):
        """Holds these. Returns what to wait for."""
        return gradients.assign(self.copies, saved), gradients.assign(self.scales, scales)


class ManualCalls(nn.Cell):
    """A transaction whose networks the user's code runs, and how a call of it begins and ends."""

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        check_plan(plan)
        self.transaction = build_transaction(plan)
        self.networks_run = nn.CellList(list(plan.networks), auto_prefix=False)
        # One branch then tells of both, and nothing of a call that has not begun stays.
        is_plain = plan.may_skip and plan.settings.gradient_accumulation_steps == 1
        self._skips_if_not_begun = is_plain and not plan.users_look_at_gradients
        self.in_one_graph = compiler(plan, self.transaction.overflow_check.detector)
        # Hidden from MindSpore: these have the same Parameters again.
        object.__setattr__(self, "held", HeldCall(plan, self.transaction.forward_state))
        object.__setattr__(self, "flush_cycle", compiled_flush(self.transaction, self.in_one_graph))

    def begin(self, *inputs):
        """Events 1 and 2 of a step, and the clearing of an NPU's register."""
        return self._begun(ops.depend(inputs, self.transaction._all_parameters))

    def begin_anew(self, *inputs):
        """The same for compiled code, in which no Python looks after a step: first it undoes one that did not end."""
        inputs = ops.depend(inputs, self.transaction._all_parameters)
        forward_state = self.transaction.forward_state
        given_up = forward_state.restore_call_if(self.transaction.watch.is_open(), self.held.copies)
        return self._begun(ops.depend(inputs, given_up))

    def _begun(self, inputs):
        scales, inputs, saved = self.transaction.begin(inputs)
        inputs = ops.depend(inputs, (self.held.hold(scales, saved), self.transaction.watch.begin()))
        overflow_check = self.transaction.overflow_check
        return overflow_check.detector.start(inputs) if overflow_check.starts else inputs

    def is_open(self):
        """Returns, in Python, whether a call has begun and not ended."""
        return bool(self.transaction.watch.is_open())

    def give_up(self):
        """Undoes, in Python, a call that did not end."""
        if len(self.held.copies) > 0 and self.is_open():
            self.transaction.forward_state.restore_call(self.held.copies)

    def end(self, grads, losses, loss_weights):
        """
        Events 4 to 9 of a step, given the scaled gradients of all optimizers, the loss, if it is known, and its weight,
        if it is a sum: tuples of one Tensor, or empty.
        """
        return self.transaction.end_of_call(self._call(grads, losses, loss_weights))

    def end_if_begun(self, grads, losses, loss_weights):
        """
        The same for compiled code, in which no Python looks after a step: a call that has not begun only counts as a
        skipped step, and many skipped steps in a row are told once.
        """
        transaction = self.transaction
        not_begun = transaction.watch.has_not_begun()
        call = self._call(grads, losses, loss_weights)
        call["is_watched"] = True
        if self._skips_if_not_begun:
            call["not_begun"] = not_begun
            call["norms"] = transaction.norms.copied()
            skipped = transaction.end_of_call(call)
        elif not_begun:
            skipped = ops.depend(not_begun, transaction.watch.count_not_begun())
        else:
            skipped = transaction.end_of_call(call)
        return skipped

    def _call(self, grads, losses, loss_weights):
        held = self.held
        grads = ops.depend(grads, (self.transaction._all_parameters, self.transaction.watch.end()))
        call = {"scales": held.scales, "losses": losses, "gradients": grads}
        if len(held.copies) > 0:
            call["saved"] = held.copies
        return _weighted(call, loss_weights) if len(loss_weights) > 0 else call


def _weighted(call, loss_weights):
    """Adds to a call the weight of its loss, a tuple of one Tensor: a mean, if the loss is that of a sum."""
    call["loss_weights"] = loss_weights * len(call["gradients"])
    if len(call["losses"]) > 0:
        call["losses"] = (mean_of(call["losses"][0], loss_weights[0]),)
    return call
