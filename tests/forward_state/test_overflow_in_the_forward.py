"""What a forward wrote tells of an overflow, unless it was not finite before. The configurations draw the rest."""

import numpy as np
from conftest import quick_in_graph_mode
from mindspore import Parameter, Tensor, nn, ops
from support.networks import FEATURES, batch

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


class Observer(nn.Cell):
    """The range of its inputs, which begins infinite."""

    def __init__(self):
        super().__init__()
        self.score = nn.Dense(FEATURES, 1)
        self.low = Parameter(Tensor(np.float32(np.inf)), name="low", requires_grad=False)
        self.lowest = Tensor(np.float32(-np.inf))
        self.high = Parameter(Tensor(np.full(2, -np.inf, np.float32)), name="high", requires_grad=False)

    def construct(self, x, y):
        ops.assign(self.low, ops.minimum(self.low, ops.ReduceMin()(x)))
        # Its second element is never written.
        ops.assign(self.high, ops.maximum(self.high, ops.stack((ops.ReduceMax()(x), self.lowest))))
        return ops.square(self.score(ops.clamp(x, -1.0, 1.0)) - y).mean()


@quick_in_graph_mode
def test_what_was_not_finite_before_is_no_overflow(mode):
    network = Observer()
    optimizer = nn.SGD(network.score.trainable_params(), 0.01)
    state = [network.low, network.high]
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), forward_state=state).set_train()
    assert not bool(cell(*batch(0))[1].asnumpy())
    high = network.high.asnumpy().copy()
    assert np.isfinite(high[0])
    x, y = (tensor.asnumpy() for tensor in batch(0))
    x[1, 1] = np.inf
    assert bool(cell(Tensor(x), Tensor(y))[1].asnumpy())
    np.testing.assert_array_equal(network.high.asnumpy(), high)
    assert not bool(cell(*batch(1))[1].asnumpy())
