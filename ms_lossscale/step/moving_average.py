"""An exponential moving average of the weights."""

import contextlib

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._mindspore import forget_failed_calls, write_in_place


class MovingAverage(nn.Cell):
    """
    The average `ema = decay * ema + (1 - decay) * weight` of one optimizer's weights, in float32, from the weights on
    that the first applied update finds: loaded ones, say.

    Args:
        decay (float): In (0, 1).
        weights (ParameterTuple): The weights.
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
        """Takes the weights as they are."""
        return gradients.assign(self.averages, gradients.cast_like(self.weights, self.averages))

    def construct(self):
        """Moves the averages, once the weights have been updated."""
        return gradients.average(self._decay, self._rest, self.averages, self.weights)

    def as_dict(self):
        """The averaged Parameters, by the weights' names."""
        return {weight.name: average for weight, average in zip(self.weights, self.averages)}


@contextlib.contextmanager
def averages_in_place(moving_averages):
    """A context in which the weights hold their averages. Puts the trained weights back, exactly, whatever happens."""
    forget_failed_calls()
    pairs = [pair for average in moving_averages for pair in zip(average.weights, average.averages)]
    trained = [(weight, ops.deepcopy(weight)) for weight, _ in pairs]
    try:
        write_in_place(pairs)
        yield
    finally:
        write_in_place(trained)
