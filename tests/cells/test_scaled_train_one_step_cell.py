"""ScaledTrainOneStepCell: what it returns, what it trains, and what it runs."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.networks import HalfPrecision, Linear, LossOfShape, batch, overflowing_batch
from support.training import assert_equal_weights, bookkeeping, by_sgd, changed, state

from ms_lossscale import DynamicLossScale, FixedLossScale


@quick_in_pynative_mode
def test_a_float16_loss_stays_float16_and_is_scaled_in_float32(mode):
    network = HalfPrecision()
    # 2**24 times the loss is infinite in float16.
    cell = by_sgd(network, FixedLossScale(2.0**24))
    loss, overflow, _ = cell(*batch())
    assert loss.dtype == mstype.float16
    np.testing.assert_array_equal(loss.asnumpy(), HalfPrecision()(*batch()).asnumpy())
    # The gradient at the loss, 2**24, is an overflow of its own as soon as float16 computing begins.
    assert bool(overflow)


class WeightItself(nn.Cell):
    """No inputs, and a loss that is the weight."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.float32(3.0)), name="weight")

    def construct(self):
        return self.weight


def test_what_it_returns_is_that_of_its_step_though_later_ones_move_it(mode):
    cell = by_sgd(WeightItself(), DynamicLossScale(64.0, scale_window=1), 0.5)
    steps = [cell() for _ in range(3)]
    # Read only now, after all later steps.
    assert [[float(each) for each in its] for its in steps] == [[3.0, 0, 64.0], [2.5, 0, 128.0], [2.0, 0, 256.0]]
    assert cell.get_loss_scale() == 512.0


@quick_in_pynative_mode
@pytest.mark.parametrize("shape", [(4, 1), *slow(((),), ((1,),))], ids=str)
def test_trains_the_sum_of_a_loss_of_any_shape_which_it_returns_with_the_overflow_and_the_scale(mode, shape):
    network, expected = LossOfShape(shape), LossOfShape(shape)
    cell = by_sgd(network, FixedLossScale(2.0**10))
    stock_cell = nn.TrainOneStepCell(expected, nn.SGD(expected.trainable_params(), 0.01))
    for step, inputs in enumerate([*map(batch, range(3)), overflowing_batch()]):
        # The network alone and the network in a training step may be compiled to operators that round differently.
        wanted = expected(*inputs).asnumpy()
        result = cell(*inputs)
        assert isinstance(result, tuple)
        loss, overflow, loss_scale = result
        assert (loss.dtype, loss.shape) == (mstype.float32, shape)
        if step < 3:
            np.testing.assert_allclose(loss.asnumpy(), wanted, rtol=1e-6)
            stock_cell(*inputs)
        else:
            assert not np.isfinite(loss.asnumpy()).all()
        assert (overflow.dtype, overflow.shape, bool(overflow)) == (mstype.bool_, (), step == 3)
        assert (loss_scale.dtype, loss_scale.shape, float(loss_scale)) == (mstype.float32, (), 1024.0)
    assert_equal_weights(network, expected)


class ClipWeights(nn.Cell):
    """What a WGAN does after an update."""

    def __init__(self, parameters, bound):
        super().__init__(auto_prefix=False)
        self.parameters, self.bound = parameters, bound
        self.runs = Parameter(Tensor(0, mstype.int32), name="clip_weights.runs", requires_grad=False)

    def clip(self):
        for parameter in self.parameters:
            ops.assign(parameter, ops.clip_by_value(parameter, -self.bound, self.bound))
        ops.assign_add(self.runs, Tensor(1, mstype.int32))


@quick_in_pynative_mode
def test_a_method_runs_after_the_optimizer_in_clean_steps_only(mode):
    """The configurations draw cells."""
    network, expected = Linear(), Linear()
    after_update = ClipWeights(network.trainable_params(), 0.05).clip
    cell = by_sgd(network, DynamicLossScale(64.0), after_update=after_update)
    nn.TrainOneStepCell(expected, nn.SGD(expected.trainable_params(), 0.01))(*batch())
    # Wanted: clipped after the first update, so at the bound somewhere, and not the bound everywhere.
    cell(*batch())
    np.testing.assert_array_equal(network.weight.asnumpy(), np.clip(expected.weight.asnumpy(), -0.05, 0.05))
    before = state(cell)
    assert bool(cell(*overflowing_batch())[1])
    assert changed(before, state(cell)) == bookkeeping(changed(before, state(cell)))
    cell(*batch())
    assert int(cell.parameters_dict()["clip_weights.runs"].asnumpy()) == 2
