"""Loss scales: their update rules, alone, in MindSpore's two protocols, and in a training cell."""

import inspect
import json
from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Tensor, amp, nn
from mindspore import dtype as mstype
from support.networks import Linear, Mlp, batch, batch_for
from support.training import assert_equal_weights

import ms_lossscale
from ms_lossscale import DynamicLossScale, FixedLossScale, LossScale, ScheduledLossScale, all_finite

# Sequences that were computed by other implementations, or by hand from the written update rule.
RULES = json.loads((Path(__file__).parents[1] / "golden" / "scale_laws.json").read_text())


class Adjust(nn.Cell):
    """`adjust`, compiled in graph mode."""

    def __init__(self, loss_scale):
        super().__init__(auto_prefix=False)
        self.loss_scale = loss_scale

    def construct(self, grads_finite):
        return self.loss_scale.adjust(grads_finite)


class ScaleAndUnscale(nn.Cell):
    def __init__(self, loss_scale):
        super().__init__(auto_prefix=False)
        self.loss_scale = loss_scale

    def construct(self, tensors):
        return self.loss_scale.scale(tensors), self.loss_scale.unscale(tensors)


def dynamic_loss_scale(rule):
    names = ("scale_factor", "scale_window", "backoff_factor", "hysteresis", "min_loss_scale", "max_loss_scale")
    return DynamicLossScale(rule["init_loss_scale"], **{name: rule[name] for name in names})


def test_the_defaults_of_a_dynamic_one_are_those_of_the_docs():
    loss_scale = DynamicLossScale()
    assert loss_scale.get_loss_scale() == 2.0**16
    for _ in range(17):
        loss_scale.adjust(Tensor(False))
    assert loss_scale.get_loss_scale() == 1.0
    # 2,000 clean steps, the first 1,998 of them as a checkpoint would bring them.
    loss_scale.parameters_dict()["loss_scale.clean_steps"].set_data(Tensor(1998, mstype.int32))
    loss_scale.adjust(Tensor(True))
    assert loss_scale.get_loss_scale() == 1.0
    loss_scale.adjust(Tensor(True))
    assert loss_scale.get_loss_scale() == 2.0


@quick_in_graph_mode
@pytest.mark.filterwarnings("ignore:For 'DynamicLossScale', init_loss_scale is 1, scale_factor")
@pytest.mark.parametrize("grads_finite", [True, False])
def test_the_scale_stays_finite_and_positive_at_the_ends_of_float32(mode, grads_finite):
    loss_scale = DynamicLossScale(
        1.0, 2.0**70, 1, backoff_factor=2.0**-70, min_loss_scale=2.0**-126, max_loss_scale=2.0**126
    )
    adjust = Adjust(loss_scale)
    for _ in range(4):
        adjust(Tensor(grads_finite))
    assert loss_scale.get_loss_scale() == (2.0**126 if grads_finite else 2.0**-126)


def test_a_fixed_one_is_128_and_drops_overflows_by_default():
    assert FixedLossScale().get_loss_scale() == 128.0
    assert FixedLossScale().drop_overflow_update


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "milestone, loss_scales",
    [([2, 5, 6], [256.0, 1024.0, 8.0]), ([1], [4.0]), ([1, 2, 3, 9], [2.0, 4.0, 2.0, 0.5]), ((3, 4), (100.0, 0.3))],
)
def test_a_schedule_means_the_same_as_piecewise_constant_lr(mode, milestone, loss_scales):
    # MindSpore's own list of one value per step is the oracle; beyond it the last value holds.
    oracle = [*nn.piecewise_constant_lr(milestone, list(loss_scales)), *[loss_scales[-1]] * 3]
    loss_scale = ScheduledLossScale(milestone, loss_scales)
    adjust, used = Adjust(loss_scale), []
    for step in range(len(oracle)):
        used.append(loss_scale.get_loss_scale())
        adjust(Tensor(step % 2 == 0))
    assert used == [float(np.float32(value)) for value in oracle]


def test_scale_and_unscale_in_float32_by_a_scale_that_was_set(mode):
    loss_scale = FixedLossScale(64.0)
    loss_scale.set_loss_scale(2.0**25)
    # 2**25 is infinite in float16, and 2**-25 is zero: there would be zeros, and no overflow to tell of it.
    tensors = tuple(Tensor([1.5, -3.0, 65504.0], dtype) for dtype in (mstype.float16, mstype.bfloat16, mstype.float32))
    for results, factor in zip(ScaleAndUnscale(loss_scale)(tensors), (2.0**25, 2.0**-25)):
        for tensor, result in zip(tensors, results):
            assert result.dtype == mstype.float32
            np.testing.assert_array_equal(result.asnumpy(), tensor.astype(mstype.float32).asnumpy() * factor)


class ProcessLossScale(nn.Cell):
    """
    On CPU the stock cell can't look for overflows: it has no kernel for that. All that it does with its `scale_sense`
    runs: reading the scale at construction, and `process_loss_scale`.
    """

    def __init__(self, stock_cell):
        super().__init__(auto_prefix=False)
        self.stock_cell = stock_cell

    def construct(self, overflow):
        return self.stock_cell.process_loss_scale(overflow)


def stock_cell_of(loss_scale):
    network = Linear()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
    return nn.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=loss_scale)


SEQUENCES = {
    "fixed": (lambda: FixedLossScale(64.0), [0, 0, 1, 1, 0], [64.0] * 5),
    "scheduled": (
        lambda: ScheduledLossScale([2, 4, 9], [64.0, 16.0, 2.0]),
        [0, 0, 1, 1, 0],
        [64.0, 16.0, 16.0, 2.0, 2.0],
    ),
    **{its["name"]: (lambda its=its: dynamic_loss_scale(its), its["overflow"], its["scale_after"]) for its in RULES},
}


@quick_in_graph_mode
@pytest.mark.parametrize("name", SEQUENCES)
def test_adjusted_and_as_scale_sense_of_the_stock_cell_it_follows_the_update_rule(mode, name):
    make, overflows, expected = SEQUENCES[name]
    loss_scale, adjusted, history = make(), make(), []
    stock_cell, adjust = stock_cell_of(loss_scale), Adjust(adjusted)
    assert float(stock_cell.scale_sense.asnumpy()) == loss_scale.get_loss_scale()
    process_loss_scale = ProcessLossScale(stock_cell)
    for overflow in overflows:
        assert bool(process_loss_scale(Tensor(bool(overflow)))) == bool(overflow)
        history.append(float(stock_cell.scale_sense.asnumpy()))
        adjust(Tensor(not overflow))
        assert loss_scale.get_loss_scale() == adjusted.get_loss_scale() == history[-1]
    assert history == expected


def test_each_update_rule_has_a_sequence():
    """Whoever adds one adds overflows, and the scales that it must have after them."""
    classes = [value for value in vars(ms_lossscale).values() if inspect.isclass(value)]
    rules = {each for each in classes if issubclass(each, LossScale)} - {LossScale}
    assert rules == {type(make()) for make, _, _ in SEQUENCES.values()}


@quick_in_pynative_mode
def test_the_scale_that_the_stock_cell_holds_is_the_one_that_counts(mode):
    loss_scale = DynamicLossScale(64.0)
    stock_cell = stock_cell_of(loss_scale)
    stock_cell.scale_sense.set_data(Tensor(1000.0))
    ProcessLossScale(stock_cell)(Tensor(True))
    assert float(stock_cell.scale_sense.asnumpy()) == loss_scale.get_loss_scale() == 500.0


def test_has_all_that_a_loss_scaler_of_mindspore_must_have():
    required = amp.LossScaler.__abstractmethods__
    assert required == {"scale", "unscale", "adjust"}
    for name in required:
        ours = inspect.signature(getattr(DynamicLossScale, name))
        assert list(ours.parameters) == list(inspect.signature(getattr(amp.LossScaler, name)).parameters)


def train_step_of(network, optimizer, loss_scale):
    def forward(x, y):
        loss = network(x, y)
        return loss_scale.scale(loss), loss

    gradient_of = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

    def train_step(x, y):
        (_, loss), grads = gradient_of(x, y)
        grads = loss_scale.unscale(grads)
        grads_finite = all_finite(grads)
        if grads_finite:
            optimizer(grads)
        loss_scale.adjust(grads_finite)
        return loss, grads_finite

    return train_step


@quick_in_pynative_mode
@pytest.mark.parametrize("compiled", [False, True], ids=["step_by_step", "jit"])
def test_in_the_place_of_a_loss_scaler_it_trains_as_the_unscaled_stock_cell_does(mode, compiled):
    network, expected = Mlp(), Mlp()
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.01)
    loss_scale = DynamicLossScale(2.0**10, 2.0, 2)
    train_step = train_step_of(network, optimizer, loss_scale)
    if compiled:
        train_step = mindspore.jit(train_step)
    stock_cell = nn.TrainOneStepCell(expected, nn.AdamWeightDecay(expected.trainable_params(), learning_rate=0.01))
    scales = []
    for step, overflow in enumerate((0, 0, 1, 0, 1, 1, 0, 0)):
        loss, grads_finite = train_step(*batch_for(overflow, seed=step))
        assert bool(grads_finite) == (not overflow)
        if not overflow:
            assert float(loss) == float(stock_cell(*batch(seed=step)))
        scales.append(loss_scale.get_loss_scale() / 2.0**10)
    assert scales == [1.0, 2.0, 1.0, 1.0, 0.5, 0.25, 0.25, 0.5]
    assert_equal_weights(network, expected)
