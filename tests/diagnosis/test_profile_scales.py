"""At which loss scale profile_gradients profiles, and when its report says that float16 rounded on the way."""

import json

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.networks import FEATURES, Linear, Mlp, batch, weight
from support.numpy_casts import shares_of_cast
from support.untouched import untouched
from test_profile_gradients import assert_counts, gradients_of

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    profile_gradients,
)
from ms_lossscale._output import written_scale
from ms_lossscale.diagnosis.profile_gradients import Float16Traces

pytestmark = pytest.mark.slow

BATCHES = [batch(seed) for seed in range(3)]


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


# Of a training cell.


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
    cell.set_loss_scale(2.0**10)
    assert profile_gradients(cell, BATCHES).loss_scale == 2.0**10


def test_each_network_with_its_own_scale_is_recommended_one(tmp_path):
    networks = [Float16Layer(), Float16Layer(2.0**-10)]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    optimizers = [nn.SGD(network.trainable_params(), 0.1) for network in networks]
    cell = SimultaneousTrainOneStepCell(networks, optimizers, [DynamicLossScale(2.0**4) for _ in networks])
    report = profile_gradients(cell, BATCHES)
    alone = [profile_gradients(network, batches=BATCHES, loss_scale=2.0**4) for network in networks]
    expected = [each.recommended_loss_scale for each in alone]
    assert expected[1] == expected[0] * 2.0**10
    assert report.recommended_loss_scale == expected == [each.loss_scale for each in report.recommend()]
    assert [each.loss_scale for each in report.recommend(headroom=3)] == [each / 2 for each in expected]
    for i, each in enumerate(alone):
        assert f"networks[{i}]: {each}" in str(report)
    content = json.loads(report.to_json())
    assert [each["loss_scale"] for each in content["recommendation"]] == expected
    assert [list(each["parameters"]) for each in content["networks"]] == [list(each.parameters) for each in alone]
    assert report.to_csv().splitlines()[0].endswith("".join(f",overflowed_at_{scale:.0f}" for scale in expected[1:]))
    report.plot("report.png")
    cell.set_loss_scale(report.recommended_loss_scale)


def test_a_network_without_a_recommendation_is_named():
    networks = [Linear(), Float16Layer(float("inf"))]
    optimizers = [nn.SGD(network.trainable_params(), 0.1) for network in networks]
    report = profile_gradients(AlternatingTrainOneStepCell(networks, optimizers, DynamicLossScale()), BATCHES)
    with pytest.raises(ValueError, match=r"recommended: networks\[1\]: in 3 of 3 batches the loss is not finite"):
        _ = report.recommended_loss_scale
    assert report.networks[0].recommended_loss_scale > 1.0
    assert "Recommended loss scale for float16: " in str(report)
    assert json.loads(report.to_json())["recommendation"] is None
    report.plot("report.png")


def test_a_scale_at_which_gradients_overflow_gives_way_to_smaller_ones(mode):
    cell = cell_of(Float16Layer(), DynamicLossScale(2.0**20, max_loss_scale=2.0**20))
    batches = Passes(BATCHES)
    with untouched(cell):
        report = profile_gradients(cell, batches)
    assert (report.loss_scale, report.ceiling, batches.count) == (2.0**12, 2.0**12, 3)
    assert report.total.non_finite == 0
    assert_counts(report, gradients_of(cell.network, cell.network.trainable_params(), BATCHES, 2.0**12))


def test_a_floor_below_1_is_the_smallest_scale():
    cell = cell_of(Float16Layer(2.0**22), DynamicLossScale(1.0, min_loss_scale=2.0**-20))
    report = profile_gradients(cell, BATCHES)
    assert report.total.non_finite == 0
    assert report.recommended_loss_scale <= report.loss_scale == 2.0**-8


# Of a plain network.


def test_a_quantised_network_is_profiled_again_at_the_recommended_scale(mode):
    network = CastsToFloat16(TINY)
    first = profile_gradients(network, batches=BATCHES, loss_scale=1.0)
    batches = Passes(BATCHES)
    with untouched(network):
        report = profile_gradients(network, batches=batches)
    assert (report.loss_scale, report.ceiling, batches.count) == (first.recommended_loss_scale, None, 2)
    assert report.loss_scale > 1.0
    grads = gradients_of(network, network.trainable_params(), BATCHES, report.loss_scale)
    assert_counts(report, grads)
    # What is saved is what float16 loses of the true gradients, not of those that it has rounded already.
    values = np.concatenate(list(grads.values()))
    losses = [shares_of_cast(values, scale).flushed for scale in (1.0, report.recommended_loss_scale)]
    assert report.recommend().saved == losses[0] - losses[1] > first.recommend().saved


@pytest.mark.parametrize("batches", [BATCHES, [(x * 1e-12, y) for x, y in BATCHES]], ids=["normal", "tiny"])
def test_a_float32_network_is_profiled_once(batches):
    batches = Passes(batches)
    report = profile_gradients(Mlp(), batches=batches)
    assert (report.loss_scale, report.quantised, batches.count) == (1.0, [], 1)


def test_an_iterator_is_kept_for_the_second_pass():
    network = CastsToFloat16(TINY)
    expected = profile_gradients(network, batches=BATCHES)
    assert profile_gradients(network, batches=iter(BATCHES)).to_json() == expected.to_json()
    # Also where a pass is broken off.
    cell = cell_of(Float16Layer(), DynamicLossScale(2.0**20))
    expected = profile_gradients(cell, BATCHES)
    assert profile_gradients(cell, (each for each in BATCHES)).to_json() == expected.to_json()


@pytest.mark.parametrize("factor", [1e-9, 1e-15])
def test_gradients_that_are_all_flushed_are_looked_for_at_larger_scales(factor):
    network = Float16Layer(factor)
    assert profile_gradients(network, batches=BATCHES, loss_scale=1.0).largest is None
    report = profile_gradients(network, batches=BATCHES)
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
    first = profile_gradients(network, batches=BATCHES, loss_scale=1.0)
    with_overflow = profile_gradients(network, batches=BATCHES, loss_scale=first.recommended_loss_scale)
    assert with_overflow.total.non_finite > 0
    report = profile_gradients(network, batches=BATCHES)
    assert report.total.non_finite == 0
    assert 1.0 < report.loss_scale == report.ceiling < first.recommended_loss_scale
    assert report.recommended_loss_scale == report.ceiling
    assert f"No loss scale above {written_scale(report.ceiling)} is recommended" in str(report)


# The hint.

HINT = "float16 rounded gradients of"


def test_the_hint_looks_at_subnormals_too():
    network = CastsToFloat16(3e-5)
    report = profile_gradients(network, batches=BATCHES, loss_scale=1.0)
    assert report.total.zeros == 0
    assert report.quantised == ["hidden", "output"]
    line = str(report).splitlines()[-1]
    assert line == (
        "At this loss scale float16 rounded gradients of 2 of 2 parameters on the way, to zero or to a subnormal "
        f"number: they are counted as rounded. Profile again with "
        f"loss_scale={written_scale(report.recommended_loss_scale)} to see what they are."
    )
    assert HINT not in str(profile_gradients(network, batches=BATCHES))


class WithTrueZeros(nn.Cell):
    """Some of its gradients are zero, and nothing was flushed."""

    def __init__(self, dtype):
        super().__init__()
        self.used = nn.Dense(FEATURES, 2).to_float(dtype)
        self.unused = nn.Dense(FEATURES, 2).to_float(dtype)

    def construct(self, x, y):
        outputs = self.used(x) + 0.0 * self.unused(x)
        return ops.square(outputs.astype(mstype.float32) - y).mean()


def test_true_zeros_of_a_float32_network_need_no_hint():
    report = profile_gradients(WithTrueZeros(mstype.float32), batches=BATCHES)
    assert report.total.zeros > 0
    assert report.quantised == []
    assert "Profile again" not in str(report)


# What float16 leaves in values.


def traces_of(values):
    traces = Float16Traces()
    for part in np.array_split(values, 3):
        traces.add(part.astype(np.float32))
    return traces


def bfloat16(values):
    return Tensor(values).astype(mstype.bfloat16).astype(mstype.float32).asnumpy()


@pytest.mark.parametrize("exponent", range(-24, 16))
def test_float16_is_told_from_other_dtypes(exponent):
    values = np.random.default_rng(exponent + 24).uniform(1.0, 2.0, 300).astype(np.float32) * np.float32(2.0**exponent)
    traces = traces_of(values.astype(np.float16))
    # From 2**-17 to 2**-16 both formats hold the same numbers.
    assert traces.are_evident == (exponent != -17)
    assert traces.lost == (exponent < -14)
    assert not traces_of(values).are_evident
    assert not traces_of(bfloat16(values)).are_evident
