"""A step that trains as MindSpore's own training cell does."""

from mindspore import Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale.step.returned import ReturnedValues
from ms_lossscale.step.step import Step


class UnscaledEnd(nn.Cell):
    """Ends a call that neither scales nor checks. Returns that its step is not skipped, and its scale."""

    def __init__(self, plan, counters):
        super().__init__(auto_prefix=False)
        self.optimizer = plan.optimizers[0]
        self.loss_scale = plan.loss_scales[0]
        self.counters = counters
        self._reduce = plan.grad_reducer

    def construct(self, grads):
        grads = grads if self._reduce is None else self._reduce(grads)
        applied_steps = ops.depend(self.counters.count_applied(), self.optimizer(grads))
        return gradients.never(applied_steps), prim.deepcopy(self.loss_scale.scale_value)


class UnscaledStep(Step):
    """
    Trains one network as MindSpore's own training cell does, and counts the step. Once its loss scale is no longer 1,
    since a user has set or loaded another one, it is the step that scales.
    """

    # Not by `super()`, which graph mode takes for that of the object's own class.
    scaled_step = Step.construct

    def __init__(self, plan, transaction, networks_run, in_one_graph):
        super().__init__(transaction, networks_run, in_one_graph)
        self.network = plan.networks[0]
        self.loss_scale = plan.loss_scales[0]
        self._is_scaled = False
        self._returned_values = ReturnedValues(plan.owner, plan.number, may_be_tuple=plan.may_return_tuple)
        self._value_and_grad = ops.value_and_grad(self._loss, None, plan.weights[0])
        self.end_of_unscaled_call = in_one_graph(UnscaledEnd(plan, transaction.counters).construct)

    def _follow_scales(self):
        was_scaled = self._is_scaled
        self._is_scaled = self.loss_scale.get_loss_scale() != 1
        return super()._follow_scales() or self._is_scaled != was_scaled

    def _loss(self, *inputs):
        output = self.network(*inputs)
        loss = output if isinstance(output, Tensor) else self._returned_values(output)[0]
        # A copy, since the update changes what a network returns that is a weight.
        return prim.deepcopy(self._returned_values.look_at(loss))

    def construct(self, *inputs):
        if self._is_scaled:
            return self.scaled_step(*inputs)
        loss, grads = self._value_and_grad(*inputs)
        skipped, scale = self.end_of_unscaled_call(ops.depend(grads, loss))
        return (loss,), ((),), skipped, (scale,)
