"""A forward that overflows where no gradient shows it: what it wrote tells, and the step is skipped."""

import numpy as np
from conftest import quick_in_graph_mode
from mindspore import Parameter, Tensor, nn, ops
from support.networks import FEATURES, BehindStopGradient, batch, overflowing
from support.training import bookkeeping, changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


def cell_of(network, **keywords):
    optimizer = nn.SGD(network.score.trainable_params(), 0.01)
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()


@quick_in_graph_mode
def test_the_step_is_skipped_and_no_lower_scale_tried(mode):
    network = BehindStopGradient()
    cell = cell_of(network, clip_norm=1.0, max_retries=2)
    cell(*batch(1))
    before = state(cell)
    loss, overflow, _ = cell(*overflowing())
    assert np.isfinite(loss.asnumpy())
    assert bool(overflow.asnumpy())
    moved = changed(before, state(cell))
    assert moved == bookkeeping(moved) | {name for name in moved if name.startswith("clipping.")}
    assert np.isfinite(network.generator[1].moving_variance.asnumpy()).all()
    assert (cell.counters()["skipped_steps"], cell.counters()["retries"]) == (1, 0)
    assert cell.overflowed_parameters() == []
    assert cell.get_loss_scale() == 2.0**9


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
    cell = cell_of(network, forward_state=[network.low, network.high])
    assert not bool(cell(*batch(0))[1].asnumpy())
    high = network.high.asnumpy().copy()
    assert np.isfinite(high[0])
    x, y = (tensor.asnumpy() for tensor in batch(0))
    x[1, 1] = np.inf
    assert bool(cell(Tensor(x), Tensor(y))[1].asnumpy())
    np.testing.assert_array_equal(network.high.asnumpy(), high)
    assert not bool(cell(*batch(1))[1].asnumpy())
