"""The two branches that a step can end in, and what they change besides weights: the averages and the counters."""

import contextlib

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._mindspore import forget_failed_calls, only_if, write_in_place
from ms_lossscale.step.cause import Cause
from ms_lossscale.step.optimizers import Optimizers
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.stage import Clipping, Conditions, ForwardState
from ms_lossscale.step.step_counters import StepCounters


class MovingAverage(nn.Cell):
    """
    Computes `ema = decay * ema + (1 - decay) * weight` for one optimizer's weights, in float32. It starts from the
    weights as they are at the first applied update, so also from loaded ones.
    """

    def __init__(self, decay, weights):
        super().__init__(auto_prefix=False)
        self.weights = weights
        self.averages = ParameterTuple(
            Parameter(ops.deepcopy(weight).astype(mstype.float32), name=f"ema.{weight.name}", requires_grad=False)
            for weight in weights
        )
        self._decay = Tensor(decay, mstype.float32)
        self._rest = Tensor(1.0 - decay, mstype.float32)

    def begin(self):
        """Copies the present weights."""
        return gradients.assign(self.averages, gradients.cast_like(self.weights, self.averages))

    def construct(self):
        """Updates the averages, after the weights."""
        return gradients.average(self._decay, self._rest, self.averages, self.weights)

    def as_dict(self):
        """Returns the averages, Parameters, by the weights' names."""
        return {weight.name: average for weight, average in zip(self.weights, self.averages)}


@contextlib.contextmanager
def averages_in_place(moving_averages):
    """A context in which the weights hold their averages. It always puts the trained weights back, exactly."""
    forget_failed_calls()
    pairs = [pair for average in moving_averages for pair in zip(average.weights, average.averages)]
    trained = [(weight, ops.deepcopy(weight)) for weight, _ in pairs]
    try:
        write_in_place(pairs)
        yield
    finally:
        write_in_place(trained)


class Update(nn.Cell):
    """
    Does all that happens in a step that is applied, given its gradients and what :class:`Conditions` returned. Returns
    a Tensor to wait for, as :class:`Undo` does. `after_update` is a list of one cell or none.
    """

    def __init__(
        self,
        clipping: Clipping,
        packing: Packing,
        optimizers: Optimizers,
        after_update: list[nn.Cell],
        moving_averages: list[MovingAverage],
        conditions: Conditions,
        step_counters: StepCounters,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.clipping = clipping
        self.packing = packing
        self.optimizers = optimizers
        self.after_update = nn.CellList(after_update, auto_prefix=False)
        self.moving_averages = nn.CellList(moving_averages, auto_prefix=False)
        self.conditions = conditions.conditions
        self.step_counters = step_counters

    def construct(self, grads, asked):
        for moving_average in self.moving_averages:
            only_if(self.step_counters.none_applied(), moving_average.begin)
        self.optimizers(self.packing.unpack(self.clipping(grads)))
        for after_update in self.after_update:
            after_update()
        for moving_average in self.moving_averages:
            moving_average()
        done = self.step_counters.count_applied()
        for condition in self.conditions:
            done = condition.observe(done, *asked[1:])
        return done


class Undo(nn.Cell):
    """
    Does all that happens in a step that is skipped. Inputs are those of :class:`Decision`, and what :class:`Conditions`
    returned. If no `flags` tell which gradients are finite, it looks.
    """

    def __init__(
        self, forward_state: ForwardState, packing: Packing, cause: Cause, step_counters: StepCounters
    ) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.packing = packing
        self.cause = cause
        self.step_counters = step_counters

    def construct(self, grads, flags, saved, origin, asked):
        are_finite = flags[0] if flags else self.packing.each_finite(grads)
        loss, state = self.cause.of_step(origin[0], origin[1])
        done = self.step_counters.count_skipped(self.packing.by_weight(are_finite), loss, state, asked[:1])
        # There may be nothing to restore, and graph mode warns of a call that does nothing if nobody uses its result.
        return ops.depend(done, self.forward_state.restore_step(saved))
