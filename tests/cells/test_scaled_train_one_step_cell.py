"""ScaledTrainOneStepCell: what it returns, what it trains, and what it runs."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.networks import (
    BATCH,
    FEATURES,
    HalfPrecision,
    Linear,
    LossOfShape,
    batch,
    batch_for,
    overflowing_batch,
    weight,
)
from support.training import assert_equal_weights, bookkeeping, changed, state

from ms_lossscale import DynamicLossScale, FixedLossScale, ScaledTrainOneStepCell


def sgd(network, learning_rate=0.1):
    return nn.SGD(network.trainable_params(), learning_rate=learning_rate)


class TestWhatItReturns:
    @quick_in_pynative_mode
    def test_a_float16_loss_stays_float16_and_is_scaled_in_float32(self, mode):
        network = HalfPrecision()
        # 2**24 times the loss is infinite in float16.
        cell = ScaledTrainOneStepCell(network, sgd(network, 0.01), FixedLossScale(2.0**24))
        loss, overflow, _ = cell(*batch())
        assert loss.dtype == mstype.float16
        np.testing.assert_array_equal(loss.asnumpy(), HalfPrecision()(*batch()).asnumpy())
        # The gradient at the loss, 2**24, is an overflow of its own as soon as float16 computing begins.
        assert bool(overflow)

    def test_the_scale_is_the_one_that_was_used_though_the_step_moves_it(self, mode):
        network = Linear()
        cell = ScaledTrainOneStepCell(network, sgd(network, 0.01), DynamicLossScale(64.0, scale_window=1))
        steps = [cell(*batch_for(overflow)) for overflow in (0, 0, 1, 0)]
        # Read only now, after all later steps.
        assert [float(loss_scale) for _, _, loss_scale in steps] == [64.0, 128.0, 256.0, 128.0]
        assert [bool(overflow) for _, overflow, _ in steps] == [False, False, True, False]
        assert cell.get_loss_scale() == 256.0


class WeightItself(nn.Cell):
    """No inputs, and a loss that is the weight."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.float32(3.0)), name="weight")

    def construct(self):
        return self.weight


class WithAux(nn.Cell):
    """Returns the loss, its weight, the flattened weight and the prediction."""

    def __init__(self):
        super().__init__()
        self.weight = weight(FEATURES, 1, name="weight")

    def construct(self, x, y):
        prediction = ops.matmul(x, self.weight)
        return ops.square(prediction - y).mean(), self.weight, self.weight.reshape(-1), prediction


class TestAux:
    @quick_in_pynative_mode
    def test_is_a_tuple_with_the_values_of_this_step(self, mode):
        network, expected = WithAux(), Linear()
        cell = ScaledTrainOneStepCell(network, sgd(network), FixedLossScale(1024), has_aux=True)
        before = network.weight.asnumpy().copy()
        _, overflow, _, aux = cell(*batch())
        assert not bool(overflow)
        assert isinstance(aux, tuple)
        its_weight, flat, prediction = aux
        # The optimizer has moved the weight since.
        assert not np.array_equal(network.weight.asnumpy(), before)
        np.testing.assert_array_equal(its_weight.asnumpy(), before)
        np.testing.assert_array_equal(flat.asnumpy(), before.reshape(-1))
        np.testing.assert_allclose(prediction.asnumpy(), batch()[0].asnumpy() @ before, rtol=1e-5)
        # Aux is not trained.
        nn.TrainOneStepCell(expected, sgd(expected))(*batch())
        assert_equal_weights(network, expected)


class TestWhatItTrains:
    @quick_in_pynative_mode
    @pytest.mark.parametrize("shape", [(BATCH, 1), *slow(((),), ((1,),))], ids=str)
    def test_the_sum_of_a_loss_of_any_shape_which_it_returns_with_the_overflow_and_the_scale(self, mode, shape):
        network, expected = LossOfShape(shape), LossOfShape(shape)
        cell = ScaledTrainOneStepCell(network, sgd(network, 0.01), FixedLossScale(2.0**10))
        stock_cell = nn.TrainOneStepCell(expected, sgd(expected, 0.01))
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
        self.parameters = parameters
        self.bound = bound
        self.runs = Parameter(Tensor(0, mstype.int32), name="clip_weights.runs", requires_grad=False)

    def construct(self):
        self.clip()

    def clip(self):
        for parameter in self.parameters:
            ops.assign(parameter, ops.clip_by_value(parameter, -self.bound, self.bound))
        ops.assign_add(self.runs, Tensor(1, mstype.int32))


class TestAfterUpdate:
    @quick_in_pynative_mode
    @pytest.mark.parametrize("is_method", [False, True], ids=["cell", "method"])
    def test_runs_after_the_optimizer_in_clean_steps_only(self, mode, is_method):
        network, expected = Linear(), Linear()
        optimizer = sgd(network, 0.01)
        clip_weights = ClipWeights(optimizer.parameters, 0.05)
        after_update = clip_weights.clip if is_method else clip_weights
        cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(64.0), after_update=after_update)
        nn.TrainOneStepCell(expected, sgd(expected, 0.01))(*batch())
        # Wanted: clipped after the first update, so at the bound somewhere, and not the bound everywhere.
        cell(*batch())
        np.testing.assert_array_equal(network.weight.asnumpy(), np.clip(expected.weight.asnumpy(), -0.05, 0.05))
        before = state(cell)
        assert bool(cell(*overflowing_batch())[1])
        assert changed(before, state(cell)) == bookkeeping(changed(before, state(cell)))
        cell(*batch())
        assert int(cell.parameters_dict()["clip_weights.runs"].asnumpy()) == 2
        assert cell.steps_made() == 3


class CountsItsForwards(nn.Cell):
    """A linear model whose forward goes through an operator that runs Python, which counts."""

    def __init__(self):
        super().__init__()
        self.weight = weight(FEATURES, 1, name="weight")
        self.forwards = 0
        self._count = ops.Custom(self._counting, lambda x: x, lambda x: x, func_type="pyfunc")

    def _counting(self, x):
        self.forwards += 1
        return x

    def construct(self, x, y):
        return ops.square(ops.matmul(self._count(x), self.weight) - y).mean()


class TestWhatItRuns:
    def test_the_forward_once_a_step(self, mode):
        network = CountsItsForwards()
        cell = ScaledTrainOneStepCell(network, sgd(network), DynamicLossScale(2.0**10)).set_train()
        for step, overflow in enumerate((0, 1, 0)):
            assert bool(cell(*batch_for(overflow))[1]) == bool(overflow)
            assert network.forwards == step + 1

    def test_a_network_without_inputs(self, mode):
        network = WeightItself()
        cell = ScaledTrainOneStepCell(network, sgd(network, 0.5), FixedLossScale(8.0))
        losses = [cell()[0] for _ in range(3)]
        # Read only now: a loss that is a Parameter is that of its step.
        assert [float(loss) for loss in losses] == [3.0, 2.5, 2.0]
