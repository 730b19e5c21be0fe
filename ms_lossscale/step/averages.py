"""Moving averages of the weights."""

import contextlib

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._mindspore import forget_failed_calls, write_in_place


class MovingAverage(nn.Cell):
    """
    Computes `ema = decay * ema + (1 - decay) * weight` for one optimizer's weights, in float32. It begins with the
    weights as they are at the first applied update, so also with loaded ones.
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

    def pairs(self):
        """Returns pairs of a weight and its average."""
        return list(zip(self.weights, self.averages))


@contextlib.contextmanager
def averages_in_place(moving_averages):
    """A context in which the weights hold their averages. It always puts the trained weights back, exactly."""
    forget_failed_calls()
    pairs = [pair for average in moving_averages for pair in average.pairs()]
    trained = [(weight, ops.deepcopy(weight)) for weight, _ in pairs]
    try:
        write_in_place(pairs)
        yield
    finally:
        write_in_place(trained)
