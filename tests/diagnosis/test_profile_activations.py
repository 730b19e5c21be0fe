"""profile_activations names the first cell where values leave float16's range, and counts what each cell gives."""

import csv
import io
import json
import os

import matplotlib.image
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore import dtype as mstype
from support.networks import FEATURES, batch
from support.numpy_casts import counts_of
from support.untouched import untouched
from test_profile_gradients import BATCHES, Failing, gan, scaled, wrong_shape

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, profile_activations
from ms_lossscale._output import written_scale

pytestmark = pytest.mark.slow


class LogOfOnePlus(nn.Cell):
    """log(1 + exp(z))."""

    def construct(self, z):
        return ops.log(1.0 + ops.exp(z))


class Softplus(nn.Cell):
    """A network whose log(1 + exp(z)) is far smaller than z, which it makes up for by a factor."""

    def __init__(self, bias=-9.5, factor=1e4):
        super().__init__()
        self.head = nn.Dense(FEATURES, 4, weight_init="ones", bias_init=bias)
        self.log1p = LogOfOnePlus()
        self.tail = nn.Dense(4, 1, weight_init="ones", has_bias=False)
        self.factor = factor

    def construct(self, x, y):
        return ops.square(self.tail(self.log1p(self.head(x))) * self.factor - y).mean()


def small_batch(seed=0):
    x, y = batch(seed)
    return x * 0.1, y


SMALL = [small_batch(seed) for seed in range(2)]


def of(report, cell, kind="output", call=0, item=0):
    """The one activation of a place."""
    (found,) = [each for each in report.activations if each.place == (cell, call, item) and each.kind == kind]
    return found


# Naming the cell.


class HalfTail(nn.Cell):
    """Values that float16 can't hold go through a cell in float32 and then through one in float16."""

    def __init__(self):
        super().__init__()
        self.small = nn.Dense(FEATURES, 4, weight_init="ones", has_bias=False)
        self.large = nn.Dense(4, 1, weight_init="ones", has_bias=False).to_float(mstype.float16)

    def construct(self, x, y):
        return ops.square(self.large(self.small(x * 1e-6) * 1e6).astype(mstype.float32) - y).mean()


def test_float32_of_a_partly_float16_network_is_not_judged_by_float16s_range():
    report = profile_activations(HalfTail(), SMALL)
    small = of(report, "small")
    assert small.keeps_float32
    assert small.outside > 0.9
    assert not small.is_notable
    assert not of(report, "large").keeps_float32
    assert "keeps in float32" in str(report)


def test_names_the_logarithm_of_a_float32_network():
    report = profile_activations(Softplus(bias=-13.0), SMALL)
    assert report.first.place == ("log1p", 0, 0)
    assert report.first.kind == "output"
    assert report.first.dtype == "Float32"
    assert report.first.outside == report.first.distribution.shares().subnormal == 1.0
    first_row = str(report).splitlines()[3]
    assert first_row.startswith("* log1p output ")
    assert "The first is log1p output." in str(report)
    assert next(csv.DictReader(io.StringIO(report.to_csv())))["cell"] == "log1p"


@pytest.mark.parametrize("compare_float32", [False, True])
def test_names_the_logarithm_of_a_float16_network(compare_float32):
    network = Softplus().to_float(mstype.float16)
    report = profile_activations(network, SMALL, compare_float32=compare_float32)
    # 1 + 1e-4 is 1 in float16: all values are zero already.
    assert report.first.place == ("log1p", 0, 0)
    assert report.first.distribution.is_all_zero
    assert report.first.is_notable
    assert str(report).splitlines()[3].startswith("* log1p output ")
    if compare_float32:
        assert report.first_jump is report.first
        assert report.first.zeros_gained == report.first.distribution.count
        assert report.first.relative_error == 1.0
        assert of(report, "head").relative_error < 2.0**-10
    else:
        assert report.first_jump is None


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_names_the_logarithm_at_an_amp_level(level):
    network = amp.auto_mixed_precision(Softplus(), level)
    with untouched(network):
        report = profile_activations(network, SMALL, compare_float32=True)
    assert report.first.place.cell == "_backbone.log1p"
    assert report.first_jump is report.first
    assert of(report, "_backbone.log1p").dtype == "Float16"


@pytest.mark.parametrize("level", ["O1", "auto"])
def test_an_amp_level_that_casts_operators_is_compared(level):
    network = amp.auto_mixed_precision(Softplus(), level)
    with untouched(network):
        report = profile_activations(network, SMALL, compare_float32=True)
    errors = [each.relative_error for each in report.activations if each.place.cell in ("head", "Softplus")]
    assert len(errors) == 4
    assert max(errors) > 2.0**-13


@pytest.mark.parametrize(
    "loss_scale, names, line",
    [
        (
            1024.0,
            ["net.1.moving_mean", "net.1.moving_variance"],
            "The forward may write, and a skipped step restores: net.1.moving_mean, net.1.moving_variance.",
        ),
        (None, None, "What the forward may write is never restored, since this training cell skips no step."),
    ],
)
def test_what_a_training_cell_restores(mode, loss_scale, names, line):
    class Normalised(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = nn.SequentialCell(nn.Dense(FEATURES, 3), nn.BatchNorm1d(3), nn.Dense(3, 1))

        def construct(self, x, y):
            return ops.square(self.net(x) - y).mean()

    network = Normalised()
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.01), loss_scale)
    report = profile_activations(cell, [batch()])
    assert report.forward_state == names
    assert str(report).splitlines()[-1] == line
    assert json.loads(report.to_json())["forward_state"] == names


# What is counted.


class Recorder:
    """What hooks of its own see: the outputs of the cells of a network, by name."""

    def __init__(self, network):
        self.outputs = {}
        self.handles = [
            cell.register_forward_hook(self._hook(name)) for name, cell in network.cells_and_names() if name
        ]

    def _hook(self, name):
        def hook(_cell, _inputs, output):
            self.outputs.setdefault(name, []).append(output.asnumpy())

        return hook


def outputs_of(network, batches):
    """From the names of the cells to all values that they put out."""
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    recorder = Recorder(network)
    for inputs in batches:
        network(*inputs)
    for handle in recorder.handles:
        handle.remove()
    mindspore.set_context(mode=mode)
    return {name: np.concatenate([each.ravel() for each in outputs]) for name, outputs in recorder.outputs.items()}


@pytest.mark.parametrize("compare_float32", [False, True])
def test_float16_values_and_their_errors_agree_with_numpy(mode, compare_float32):
    network = Softplus(bias=-7.6).to_float(mstype.float16)
    values, exact = outputs_of(network, SMALL), outputs_of(Softplus(bias=-7.6), SMALL)
    report = profile_activations(network, SMALL, compare_float32=compare_float32)
    assert report.batches == 2
    for name in ("head", "log1p", "tail"):
        assert values[name].dtype == np.float16
        activation = of(report, name)
        assert activation.dtype == "Float16"
        assert activation.distribution.as_dict() == counts_of(values[name].astype(np.float32))
        if compare_float32:
            errors = values[name].astype(np.float64) - exact[name]
            expected = np.linalg.norm(errors) / np.linalg.norm(exact[name].astype(np.float64))
            np.testing.assert_allclose(activation.relative_error, expected, rtol=1e-12)
            assert activation.zeros_gained == np.sum((values[name] == 0) & (exact[name] != 0))
        else:
            assert (activation.relative_error, activation.zeros_gained) == (None, None)


def test_gradients_are_counted_with_the_loss_scale():
    x, y = batch()
    network = nn.WithLossCell(nn.Dense(FEATURES, 1, weight_init="ones", has_bias=False), nn.MSELoss())
    for loss_scale in (1.0, 2.0**10):
        report = profile_activations(network, [(x, y)], loss_scale=loss_scale)
        assert report.loss_scale == loss_scale
        expected = 2 / len(x) * (x.asnumpy().sum(axis=1, keepdims=True) - y.asnumpy()) * loss_scale
        distribution = of(report, "_backbone", "gradient").distribution
        np.testing.assert_allclose(distribution.min, np.abs(expected).min(), rtol=1e-4)
        np.testing.assert_allclose(distribution.max, np.abs(expected).max(), rtol=1e-4)
        assert of(report, "WithLossCell", "gradient").distribution.max == loss_scale


@pytest.mark.parametrize(
    "make, scales",
    [
        (scaled, [2.0**10]),
        (lambda: gan("simultaneous"), [2.0**10] * 2),
        (lambda: gan("simultaneous", [DynamicLossScale(2.0**10), 2.0**4]), [2.0**10, 2.0**4]),
        (lambda: gan("alternating", [DynamicLossScale(2.0**10), None]), [2.0**10, 1.0]),
    ],
)
def test_a_training_cell_is_profiled_at_its_own_scales(make, scales):
    cell, batches, _ = make()
    roots = [f"networks[{i}]" for i in range(2)] if len(scales) == 2 else [type(cell.network).__name__]

    def largest(report):
        return [of(report, root, "gradient").distribution.max for root in roots]

    report = profile_activations(cell, batches)
    assert largest(report) == scales
    assert report.loss_scale == (scales if len(set(scales)) == 2 else scales[0])
    written = " and ".join(written_scale(scale) for scale in dict.fromkeys(scales))
    assert f"gradients at loss scale {written}; " in str(report)
    assert json.loads(report.to_json())["loss_scale"] == report.loss_scale
    report = profile_activations(cell, batches, loss_scale=2.0)
    assert (report.loss_scale, largest(report)) == (2.0, [2.0] * len(scales))


def test_infinity_is_an_infinite_error():
    network = nn.SequentialCell(
        nn.Dense(FEATURES, 4, weight_init="ones"), nn.Dense(4, 4, weight_init="ones"), nn.Dense(4, 1)
    )
    network.to_float(mstype.float16)
    report = profile_activations(network, [Tensor(np.full((2, FEATURES), 1e4, np.float32))], compare_float32=True)
    errors = [of(report, name).relative_error for name in ("0", "1", "2")]
    assert errors[0] < 2.0**-10
    assert errors[1:] == [np.inf, np.inf]
    assert report.first_jump.place.cell == "1"
    # Nothing jumps any more.
    assert not of(report, "2").error_jumps
    assert json.loads(report.to_json(), parse_constant=pytest.fail)["activations"][1]["relative_error"] == "inf"
    assert str(report).splitlines()[3].split()[-3:] == ["inf", "jump", "0"]


# The training cells.


# Nothing changes.


@pytest.mark.parametrize("make", [scaled, lambda: gan("tuple"), lambda: gan("alternating")], ids=["1", "2", "3"])
def test_nothing_changes(mode, make):
    cell, batches, _ = make()
    cell.set_train()
    with untouched(cell):
        profile_activations(cell, batches)


class Mix(nn.Cell):
    """As a gradient penalty does, it multiplies each sample by another random number, and it writes state."""

    def __init__(self):
        super().__init__()
        self.factor = Parameter(Tensor(1.0), requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.factor, Tensor(0.5))
        return x * (ops.rand(x.shape[0], 1) * self.factor).astype(x.dtype)


class Mixed(nn.Cell):
    """Random numbers, and a logarithm whose values float16 loses whatever they are."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, FEATURES, weight_init="ones", has_bias=False)
        self.mix = Mix()
        self.tail = LogOfOnePlus()

    def construct(self, x):
        return self.tail(self.mix(self.dense(x)) - 10.0).astype(mstype.float32).mean()


def test_what_differs_between_two_runs_is_not_compared():
    network = Mixed().to_float(mstype.float16)
    with untouched(network):
        report = profile_activations(network, [x * 0.01 for x, _ in BATCHES], compare_float32=True)
    varying = [each for each in report.activations if each.varies]
    assert [str(each) for each in varying] == ["mix output", "mix gradient", "dense gradient"]
    assert all((each.relative_error, each.zeros_gained, each.error_jumps) == (None, None, False) for each in varying)
    # What float16 loses is found in spite of it.
    assert (str(report.first_jump), report.first_jump.relative_error) == ("tail output", 1.0)
    assert "3 of 8 places differ between two runs as they are, " in str(report)
    assert "The first is mix output. " in str(report)
    rows = csv.DictReader(io.StringIO(report.to_csv()))
    assert {f"{row['cell']} {row['kind']}" for row in rows if int(row["varies"])} == {str(each) for each in varying}


def test_a_users_hooks_stay():
    network = Softplus()
    seen = []
    network.log1p.register_forward_hook(lambda _cell, _inputs, _output: seen.append("forward"))
    network.log1p.register_backward_hook(lambda _cell, _inputs, _outputs: seen.append("backward"))
    with untouched(network):
        profile_activations(network, SMALL)
    assert seen == ["forward", "backward"] * 2


class Compiled(nn.Cell):
    """A cell whose construct is compiled in PyNative mode too."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 4, weight_init="ones")

    @mindspore.jit
    def construct(self, x):
        return self.dense(x)


@pytest.mark.parametrize("jit", [None, "1"])
def test_the_cells_inside_a_compiled_one_are_seen(mode, jit, monkeypatch):
    if jit is not None:
        monkeypatch.setenv("MS_JIT", jit)
    network = nn.SequentialCell(Compiled(), nn.Dense(4, 1, weight_init="ones"))
    with untouched(network):
        report = profile_activations(network, [BATCHES[0][0]])
    names = [each.place.cell for each in report.activations if each.kind == "output"]
    assert names == ["0.dense", "0", "1", "SequentialCell"]
    assert os.environ.get("MS_JIT") == jit


# The report.


def test_json():
    report = profile_activations(Softplus(factor=1.0).to_float(mstype.float16), SMALL, compare_float32=True)
    text = report.to_json("report.json")
    with open("report.json") as file:
        assert file.read() == text
    content = json.loads(text, parse_constant=pytest.fail)
    assert (content["batches"], content["loss_scale"]) == (2, 1.0)
    for values, activation in zip(content["activations"], report.activations):
        assert (values["cell"], values["call"], values["item"]) == activation.place
        assert values["kind"] == activation.kind
        assert values["relative_error"] == activation.relative_error
        assert values["zeros_gained"] == activation.zeros_gained
        assert values["float16"] == activation.distribution.shares()._asdict()
        assert values["histogram"] == {str(e): n for e, n in activation.distribution.histogram().items()}


def test_plot():
    profile_activations(Softplus(), SMALL).plot("report.png")
    assert matplotlib.image.imread("report.png").shape[2] == 4


# Bad input.


def test_a_forward_that_fails(mode):
    network = Failing()
    message = r"For 'profile_activations', the network fails on batches\[1\] in PyNative mode, in which "
    with untouched(network), pytest.raises(RuntimeError, match=message):
        profile_activations(network, [BATCHES[0], wrong_shape()])


@pytest.mark.parametrize(
    "network, batches, keywords, error, message",
    [
        (Softplus(), [], {}, ValueError, "'batches' must not be empty"),
        (Softplus(), None, {}, TypeError, "'batches' must be an iterable of batches, but got None"),
        (Softplus(), SMALL, {"loss_scale": -1}, ValueError, "'loss_scale' must be a finite number > 0"),
        (Softplus(), SMALL, {"compare_float32": 1}, TypeError, "'compare_float32' must be True or False, but got 1"),
        (
            Softplus(),
            SMALL,
            {"compare_float32": True},
            ValueError,
            "some cell .* must compute in float16 or bfloat16 because of to_float or mindspore.amp, but none does. "
            "Casts that are written in a construct, such as .*, can't be switched",
        ),
        (None, SMALL, {}, TypeError, "'network' must be a Cell, but got None"),
    ],
)
def test_wrong_arguments(network, batches, keywords, error, message):
    with pytest.raises(error, match=f"For 'profile_activations', .*{message}"):
        profile_activations(network, batches, **keywords)
