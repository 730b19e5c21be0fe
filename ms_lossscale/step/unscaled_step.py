"""A training step with nothing to scale, to check or to undo."""

from mindspore import Tensor, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale.step.returned import ReturnedValues
from ms_lossscale.step.step import HeldStep


class UnscaledStep(HeldStep):
    """
    Trains one network as MindSpore's own training cell does, and counts the step. Once its loss scale is no longer 1,
    since a user has set or loaded another one, it is the step that scales.

    Args:
        plan (StepPlan): What the step is built of.
        scaled_step (Step): The step that scales.
    """

    def __init__(self, plan, scaled_step):
        super().__init__()
        self.scaled_step = scaled_step
        self.transaction = scaled_step.transaction
        self.networks_run = scaled_step.networks_run
        self.network = plan.networks[0]
        self.optimizer = plan.optimizers[0]
        self.loss_scale = plan.loss_scales[0]
        self._is_scaled = False
        self._known_settings = 0
        self._reduce = None if plan.ranks is None else plan.ranks.grad_reducer
        self._returned_values = ReturnedValues(plan.owner, plan.number, may_be_tuple=plan.may_return_tuple)
        self._value_and_grad = ops.value_and_grad(self._loss, None, plan.weights[0])

    @staticmethod
    def fits(plan):
        """Returns whether there is nothing else to do in the step than MindSpore's own training cell does."""
        return plan.is_unscaled and len(plan.optimizers) == 1 and plan.settings.ask_for_nothing()

    def changes(self):
        """Looks, before a step, whether the loss scale was set. Returns whether the step has become another one."""
        if self._known_settings == self.loss_scale.times_set:
            return False
        self._known_settings = self.loss_scale.times_set
        was_scaled = self._is_scaled
        self._is_scaled = self.loss_scale.get_loss_scale() != 1
        return self._is_scaled != was_scaled

    def _loss(self, *inputs):
        output = self.network(*inputs)
        # A copy, since the update changes what a network returns that is a weight.
        return prim.deepcopy(output if isinstance(output, Tensor) else self._returned_values(output)[0])

    def construct(self, *inputs):
        if self._is_scaled:
            return self.scaled_step(*inputs)
        loss, grads = self._value_and_grad(*inputs)
        if self._reduce is not None:
            grads = self._reduce(grads)
        counters = self.transaction.counters
        applied_steps = ops.depend(counters.count_applied(), self.optimizer(ops.depend(grads, loss)))
        return (loss,), ((),), gradients.never(applied_steps), (prim.deepcopy(self.loss_scale.scale_value),)
