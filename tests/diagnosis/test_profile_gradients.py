"""profile_gradients counts exactly the gradients of a network or of a training cell, and leaves all as it was."""

import re

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, dataset, nn, ops
from mindspore import dtype as mstype
from support.diagnosed_cells import BATCHES, CELLS, Failing, assert_counts, gan, gradients_of, scaled, wrong_shape
from support.gan_networks import WithAux, gan_batch, rows_of
from support.networks import (
    FEATURES,
    HalfPrecision,
    Linear,
    LossOfShape,
    Mlp,
    Normalised,
    batch,
    overflowing_batch,
    weight,
)
from support.numpy_casts import shares_of_cast
from support.python_process import is_older_mindspore
from support.untouched import untouched

from ms_lossscale import (
    DynamicLossScale,
    ScaledTrainOneStepCell,
    ShardedOptimizer,
    SimultaneousTrainOneStepCell,
    profile_gradients,
)


class CastsToFloat16(nn.Cell):
    """Two layers that cast to float16 in their `construct`; a factor of the float32 loss sets the size of gradients."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.hidden = weight(FEATURES, 5, name="hidden")
        self.output = weight(5, 1, seed=1, name="output")
        self.factor = factor

    def construct(self, x, y):
        hidden = ops.tanh(ops.matmul(x.astype(mstype.float16), self.hidden.astype(mstype.float16)))
        outputs = ops.matmul(hidden, self.output.astype(mstype.float16)).astype(mstype.float32)
        return ops.square(outputs - y).mean() * self.factor


def frozen():
    network = Normalised().set_train()
    network.norm.set_train(False)
    return network


@pytest.mark.parametrize(
    "make, loss_scale",
    [
        (CastsToFloat16, 2.0**12),
        *slow((Mlp, 1.0), (Normalised, 2.0**12), (frozen, 1.0), (HalfPrecision, 1.0), (CastsToFloat16, 2.0**-12)),
        *slow((lambda: LossOfShape((4, 1)), 1.0)),
    ],
)
def test_counts_the_gradients_of_a_network_in_the_present_mode(mode, make, loss_scale):
    if make is HalfPrecision and mode == "graph" and is_older_mindspore():
        pytest.skip("MindSpore leaves out a cast to float16 and back, and its rounding, in one of the two graphs")
    network = make()
    if make is not frozen:
        network.set_train()
    weights = network.trainable_params()
    with untouched(network):
        report = profile_gradients(network, BATCHES, parameters=weights, loss_scale=loss_scale)
    grads = gradients_of(network, weights, BATCHES, loss_scale)
    assert (report.batches, report.loss_scale, report.clip_norm, report.step) == (3, loss_scale, None, None)
    assert report.non_finite_losses == 0
    assert report.largest == max(np.abs(values).max() for values in grads.values())
    assert_counts(report, grads)


def test_forms_of_batches():
    columns = tuple(np.concatenate(column) for column in zip(*rows_of(BATCHES)))
    network = Linear()
    expected = profile_gradients(network, BATCHES, parameters=[network.weight]).to_json()
    of_dataset = dataset.NumpySlicesDataset(columns, ["x", "y"], shuffle=False).batch(4)
    for form in ([list(inputs) for inputs in BATCHES], rows_of(BATCHES), iter(BATCHES), of_dataset):
        assert profile_gradients(network, form, parameters=[network.weight]).to_json() == expected


def test_clip():
    network = Mlp()
    weights = network.trainable_params()
    clip, clipped, largest = 0.5, {weight.name: [] for weight in weights}, []
    # The last batch is within the bound.
    x, _ = batch(3)
    hidden = ops.tanh(ops.matmul(x, network.hidden) + network.hidden_bias)
    batches = [*BATCHES, (x, ops.matmul(hidden, network.output) + network.output_bias + 1e-3)]
    for inputs in batches:
        grads = gradients_of(network, weights, [inputs])
        norm = np.sqrt(sum(np.sum(np.square(values.astype(np.float64))) for values in grads.values()))
        largest.append((norm, max(np.abs(values).max() for values in grads.values())))
        for name, values in grads.items():
            clipped[name].append(values * np.float32(clip / norm) if norm > clip else values)
    assert max(largest)[0] > clip > min(largest)[0]
    report = profile_gradients(network, batches, parameters=weights, clip_norm=clip)
    assert report.clip_norm == clip
    assert report.largest == max(each for _, each in largest)
    assert_counts(report, {name: np.concatenate(arrays) for name, arrays in clipped.items()})
    # It hides no overflow.
    report = profile_gradients(Linear(), [BATCHES[0], overflowing_batch()], clip_norm=1e-3)
    assert report.parameters["weight"].non_finite > 0
    assert report.non_finite_losses == 1


@pytest.mark.parametrize("kind", ["alternating", *slow(*(kind for kind in CELLS if kind != "alternating"))])
@quick_in_pynative_mode
def test_of_a_training_cell_it_counts_the_gradients_and_changes_nothing(mode, kind):
    cell, batches, parts = CELLS[kind]()
    with untouched(cell.set_train()):
        report = profile_gradients(cell, batches)
    grads = {}
    for loss, weights, its_batches, item in parts:
        grads.update(gradients_of(loss, weights, its_batches, item=item))
    reports = [report] if hasattr(report, "parameters") else list(report)
    assert [(each.batches, each.step) for each in reports] == [(len(batches), 0)] * len(reports)
    for each in reports:
        assert_counts(each, {name: grads[name] for name in each.parameters})
    assert {name for each in reports for name in each.parameters} == set(grads)


def test_the_step_of_a_training_cell():
    cell, batches, _ = CELLS["scaled"]()
    # A skipped one counts, too.
    for inputs in (*batches[:2], overflowing_batch()):
        cell(*inputs)
    assert profile_gradients(cell, batches).step == 3


class Float16Layer(nn.Cell):
    """A layer that MindSpore casts to float16, whose gradients are about `factor`."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.layer = nn.Dense(FEATURES, 1, weight_init="ones").to_float(mstype.float16)
        self.factor = factor

    def construct(self, x, y):
        return (self.layer(x).astype(mstype.float32) - y).mean() * self.factor


# At loss scale 1 float16 flushes some of its gradients and rounds the others.
TINY = 1e-7


def cell_of(network, loss_scale):
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1), loss_scale)


class Passes:
    """Batches that count how often they were gone through."""

    def __init__(self, batches):
        self.batches, self.count = batches, 0

    def __iter__(self):
        self.count += 1
        return iter(self.batches)


@quick_in_graph_mode
def test_a_training_cell_is_profiled_at_its_own_scale(mode):
    network = CastsToFloat16(TINY)
    cell = cell_of(network, DynamicLossScale(2.0**12))
    batches = Passes(BATCHES)
    report = profile_gradients(cell, batches)
    assert (report.loss_scale, report.ceiling, batches.count) == (2.0**12, None, 1)
    assert_counts(report, gradients_of(network, network.trainable_params(), BATCHES, 2.0**12))
    at_one = profile_gradients(cell, BATCHES, loss_scale=1.0)
    assert at_one.loss_scale == 1.0
    assert at_one.total.zeros > report.total.zeros == 0


def test_each_network_with_its_own_scale_is_recommended_one():
    networks = [Float16Layer(), Float16Layer(2.0**-10), Float16Layer(float("inf"))]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    optimizers = [nn.SGD(network.trainable_params(), 0.1) for network in networks]
    cell = SimultaneousTrainOneStepCell(networks[:2], optimizers[:2], [DynamicLossScale(2.0**4), 2.0**4])
    reports = profile_gradients(cell, BATCHES)
    alone = [profile_gradients(network, BATCHES, loss_scale=2.0**4) for network in networks]
    expected = [each.recommended_loss_scale for each in alone[:2]]
    assert expected[1] == expected[0] * 2.0**10
    assert reports.recommended_loss_scale == expected == [each.recommend().loss_scale for each in reports]
    assert str(reports) == "\n\n".join(f"networks[{i}]: {each}" for i, each in enumerate(alone[:2]))
    # Without a recommendation for one of them.
    cell = SimultaneousTrainOneStepCell(networks[1:], optimizers[1:], [DynamicLossScale(2.0**4), 2.0**4])
    reports = profile_gradients(cell, BATCHES)
    with pytest.raises(ValueError, match=r"recommended: in 3 of 3 batches the loss is not finite"):
        _ = reports.recommended_loss_scale
    assert reports[0].recommended_loss_scale == expected[1]


@quick_in_pynative_mode
def test_a_scale_at_which_gradients_overflow_gives_way_to_smaller_ones(mode):
    cell = cell_of(Float16Layer(), DynamicLossScale(2.0**20, max_loss_scale=2.0**20))
    batches = Passes(BATCHES)
    with untouched(cell):
        report = profile_gradients(cell, batches)
    assert (report.loss_scale, report.ceiling, batches.count) == (2.0**12, 2.0**12, 3)
    assert report.total.non_finite == 0
    assert_counts(report, gradients_of(cell.network, cell.network.trainable_params(), BATCHES, 2.0**12))
    # An iterator is kept for the further passes.
    assert profile_gradients(cell, iter(BATCHES)).to_json() == report.to_json()
    # A floor below 1 is the smallest scale.
    report = profile_gradients(cell_of(Float16Layer(2.0**22), DynamicLossScale(1.0, min_loss_scale=2.0**-20)), BATCHES)
    assert report.total.non_finite == 0
    assert report.recommended_loss_scale <= report.loss_scale == 2.0**-8


def test_a_quantised_network_is_profiled_again_at_the_recommended_scale(mode):
    network = CastsToFloat16(TINY)
    first = profile_gradients(network, BATCHES, loss_scale=1.0)
    batches = Passes(BATCHES)
    with untouched(network):
        report = profile_gradients(network, batches)
    assert (report.loss_scale, report.ceiling, batches.count) == (first.recommended_loss_scale, None, 2)
    assert report.loss_scale > 1.0
    grads = gradients_of(network, network.trainable_params(), BATCHES, report.loss_scale)
    assert_counts(report, grads)
    # What is saved is what float16 loses of the true gradients, not of those that it has rounded already.
    values = np.concatenate(list(grads.values()))
    losses = [shares_of_cast(values, scale).flushed for scale in (1.0, report.recommended_loss_scale)]
    assert report.recommend().saved == losses[0] - losses[1] > first.recommend().saved


def test_a_float32_network_is_profiled_once():
    for inputs in (BATCHES, [(x * 1e-12, y) for x, y in BATCHES]):
        batches = Passes(inputs)
        report = profile_gradients(Mlp(), batches)
        assert (report.loss_scale, report.quantised, batches.count) == (1.0, [], 1)


def test_gradients_that_are_all_flushed_are_looked_for_at_larger_scales():
    network = Float16Layer(1e-15)
    assert profile_gradients(network, BATCHES, loss_scale=1.0).largest is None
    report = profile_gradients(network, BATCHES)
    assert report.loss_scale == report.recommended_loss_scale > 2.0**16
    assert_counts(report, gradients_of(network, network.trainable_params(), BATCHES, report.loss_scale))


class Narrow(nn.Cell):
    """A float16 network whose gradients are 2**10 times larger inside than at its weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(FEATURES, FEATURES, weight_init="ones", has_bias=False).to_float(mstype.float16)

    def construct(self, x, y):
        hidden = self.layer(x * 2.0**-26).astype(mstype.float16)
        return (hidden * 2.0**8).astype(mstype.float32).mean() + 0.0 * y.sum()


def test_a_recommended_scale_at_which_gradients_overflow_inside_is_not_recommended():
    network = Narrow()
    first = profile_gradients(network, BATCHES, loss_scale=1.0)
    with_overflow = profile_gradients(network, BATCHES, loss_scale=first.recommended_loss_scale)
    assert with_overflow.total.non_finite > 0
    report = profile_gradients(network, BATCHES)
    assert report.total.non_finite == 0
    assert 1.0 < report.loss_scale == report.ceiling < first.recommended_loss_scale
    assert report.recommended_loss_scale == report.ceiling
    (above,) = re.findall(r"No loss scale above (\S+) is recommended", str(report))
    assert eval(above) == report.ceiling


HINT = "float16 rounded gradients of"


def test_the_hint_looks_at_subnormals_too():
    network = CastsToFloat16(3e-5)
    report = profile_gradients(network, BATCHES, loss_scale=1.0)
    assert report.total.zeros == 0
    assert report.quantised == ["hidden", "output"]
    line = str(report).splitlines()[-1]
    assert line.startswith(f"At loss scale 1 {HINT} 2 of 2 parameters on the way, to zero or to a subnormal number")
    assert eval(re.search(r"loss_scale=(\S+) to see", line)[1]) == report.recommended_loss_scale
    assert HINT not in str(profile_gradients(network, BATCHES))


class Values(nn.Cell):
    """A float32 weight whose gradients are these values, computed in a dtype."""

    def __init__(self, values, dtype):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(values.shape, np.float32)), name="weight")
        self.values, self.dtype = Tensor(values, dtype), dtype

    def construct(self, x):
        return (self.weight.astype(self.dtype) * self.values).astype(mstype.float32).sum() + 0.0 * x.sum()


@pytest.mark.parametrize("exponent", [-24, -18, -17, -16, -15, -14, 0, 15])
def test_float16_is_told_from_other_dtypes(exponent):
    values = np.random.default_rng(exponent + 24).uniform(1.0, 2.0, 300).astype(np.float32) * np.float32(2.0**exponent)
    rounded = Tensor(values).astype(mstype.bfloat16).astype(mstype.float32).asnumpy()
    of_float16, of_float32, of_bfloat16 = (
        profile_gradients(Values(its, dtype), [BATCHES[0][0]], loss_scale=1.0).quantised
        for its, dtype in ((values, mstype.float16), (values, mstype.float32), (rounded, mstype.float32))
    )
    # From 2**-17 to 2**-16 float16 and bfloat16 hold the same numbers, from 2**-14 on float16 loses none.
    assert bool(of_float16) == (exponent < -14 and exponent != -17)
    assert (of_float32, of_bfloat16) == ([], [])


def test_weights_that_are_not_finite_are_named():
    network = Linear()
    values = network.weight.asnumpy()
    ops.assign(network.weight, Tensor(np.where(np.arange(FEATURES)[:, None] == 1, np.nan, values)))
    report = profile_gradients(network, BATCHES, loss_scale=1.0)
    assert report.not_finite_weights == {"weight": 1}
    remark = r"No loss scale can be recommended: Weights themselves are infinite or NaN: weight \(1 value\)"
    with pytest.raises(ValueError, match=remark):
        report.recommend()


def test_a_forward_that_fails(mode):
    network = Failing()
    message = r"For 'profile_gradients', the network fails on batches\[1\], before there is anything to look at: "
    with untouched(network), pytest.raises(RuntimeError, match=message) as caught:
        profile_gradients(network, [BATCHES[0], wrong_shape()], parameters=network.trainable_params())
    hint = "It was run in PyNative mode. A network that runs in graph mode only"
    assert (hint in str(caught.value)) == (mode == "pynative")


NETWORK = Linear()
WITH_AUX = WithAux(Linear())
MLP = Mlp()
CELL, GAN = scaled()[0], gan("alternating")[0]


@pytest.mark.parametrize(
    "network, batches, keywords, error, message",
    [
        (NETWORK, iter(()), {}, ValueError, "'batches' must not be empty"),
        (NETWORK, None, {}, TypeError, "'batches' must be an iterable of batches, but got None"),
        (NETWORK, BATCHES[0][0], {}, TypeError, "'batches' must be an iterable of batches, but go"),
        (NETWORK, [(1, 2)], {}, TypeError, r"'batches\[0\]' must be a Tensor.*but got \(1, 2\)"),
        (NETWORK, BATCHES, {"parameters": BATCHES}, TypeError, "'parameters' must be a list of the network's Param"),
        (NETWORK, BATCHES, {"parameters": []}, ValueError, "'parameters' must be .*, but there are none"),
        (NETWORK, BATCHES, {"parameters": MLP.trainable_params()}, ValueError, "it does not have .*hidden.weight"),
        (CELL, BATCHES, {"parameters": CELL.weights}, ValueError, "'parameters' must be None for a training cell"),
        ("network", BATCHES, {}, TypeError, "'network' must be a Cell, but got 'network'"),
        (NETWORK, BATCHES, {"loss_scale": 0.0}, ValueError, "'loss_scale' must be a finite number > 0"),
        (NETWORK, BATCHES, {"clip_norm": float("nan")}, ValueError, "'clip_norm' must be a number > 0, but got nan"),
        (NETWORK, BATCHES, {"clip_norm": "1"}, TypeError, "'clip_norm' must be a number"),
        (nn.ReLU(), BATCHES, {}, ValueError, "the network must have trainable parameters, but there are none"),
        (WITH_AUX, BATCHES, {}, RuntimeError, r"batches\[0\].*It must return a Tensor, the loss: wrap it"),
        (GAN, [gan_batch()[:3]], {}, RuntimeError, r"batches\[0\].*gives network 1 the input at position 3, but the"),
    ],
)
def test_wrong_arguments(network, batches, keywords, error, message):
    with pytest.raises(error, match=f"For 'profile_gradients', .*{message}"):
        profile_gradients(network, batches, **keywords)


class PartlyFloat16(nn.Cell):  # A float16 weight among float32 ones, whose gradients float16 flushes to zero unscaled.
    def __init__(self):
        super().__init__()
        self.half = weight(FEATURES, 5, name="half", dtype=np.float16)
        self.single = weight(5, 1, seed=1, name="single")

    def construct(self, x):
        hidden = ops.matmul(x.astype(mstype.float16), self.half).astype(mstype.float32)
        return ops.matmul(hidden, self.single).mean() * 2.0**-30


def test_gradients_that_float16_weights_lose_at_every_scale_are_told(mode):
    network = PartlyFloat16()
    batches = [batch()[:1]]
    weights = network.trainable_params()
    cell = ScaledTrainOneStepCell(network, nn.SGD(weights, 0.1), DynamicLossScale(2.0**20))
    report = profile_gradients(cell, batches)
    assert report.float16_weights == ["half"] == profile_gradients(network, batches).float16_weights
    assert "100.00 % of the gradients of float16 weights are lost, at this loss scale and at any other." in str(report)
    assert "These weights are float16: half. An optimizer gets their gradients in float16" in str(report)
    masters = ShardedOptimizer(weights, lambda its: nn.SGD(its, 0.1))
    report = profile_gradients(ScaledTrainOneStepCell(network, masters, DynamicLossScale(2.0**20)), batches)
    assert report.float16_weights == []
    assert "float16 weights" not in str(report)
