"""profile_activations names the first cell where values leave float16's range, and counts what each cell gives."""

import csv
import io
import json
import os

import matplotlib.image
import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import amp, nn, ops
from mindspore import dtype as mstype
from support.diagnosed_cells import BATCHES, gan, scaled
from support.in_mode import in_mode
from support.networks import FEATURES, batch
from support.numpy_casts import counts_of
from support.untouched import untouched

from ms_lossscale import DynamicLossScale, profile_activations


class LogOfOnePlus(nn.Cell):
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


SMALL = [(x * 0.1, y) for x, y in map(batch, range(2))]


def of(report, cell, kind="output", call=0, item=0):
    """The one activation of a place."""
    (found,) = [each for each in report.activations if each.place == (cell, call, item) and each.kind == kind]
    return found


def test_float32_of_a_partly_float16_network_is_not_judged_by_float16s_range():
    class HalfTail(nn.Cell):
        def __init__(self):
            super().__init__()
            self.small = nn.Dense(FEATURES, 4, weight_init="ones", has_bias=False)
            self.large = nn.Dense(4, 1, weight_init="ones", has_bias=False).to_float(mstype.float16)

        def construct(self, x, y):
            return ops.square(self.large(self.small(x * 1e-6) * 1e6).astype(mstype.float32) - y).mean()

    report = profile_activations(HalfTail(), SMALL)
    small = of(report, "small")
    assert (small.keeps_float32, small.outside > 0.9, small.is_notable) == (True, True, False)
    assert not of(report, "large").keeps_float32
    assert "keeps in float32" in str(report)


def test_names_the_logarithm_of_a_float32_network_and_the_report(mode):
    network = Softplus(bias=-13.0)
    with untouched(network):
        report = profile_activations(network, SMALL)
    assert report.first.place == ("log1p", 0, 0)
    assert (report.first.kind, report.first.dtype) == ("output", "Float32")
    assert report.first.outside == report.first.distribution.shares().subnormal == 1.0
    lines = str(report).splitlines()
    title = "Values at the cells in 2 batches in training mode, gradients at loss scale 1; what float16 does to them"
    assert lines[0] == title
    assert lines[2].split()[:3] == ["cell", "dtype", "values"] and lines[3].startswith("* log1p output ")
    assert "The first is log1p output." in str(report)
    assert next(csv.DictReader(io.StringIO(report.to_csv())))["cell"] == "log1p"
    text = report.to_json("report.json")
    with open("report.json") as file:
        assert file.read() == text
    content = json.loads(text, parse_constant=pytest.fail)
    assert (content["batches"], content["loss_scale"]) == (2, 1.0)
    for values, activation in zip(content["activations"], report.activations):
        assert (values["cell"], values["call"], values["item"], values["kind"]) == (*activation.place, activation.kind)
        assert values["float16"] == activation.distribution.shares()._asdict()
        assert values["histogram"] == {str(e): n for e, n in activation.distribution.histogram().items()}
    report.plot("report.png")
    assert matplotlib.image.imread("report.png").shape[2] == 4


@pytest.mark.parametrize("level", ["by hand", *slow("O2", "O3")])
def test_names_the_logarithm_of_a_float16_network(level):
    network = Softplus()
    network = network.to_float(mstype.float16) if level == "by hand" else amp.auto_mixed_precision(network, level)
    report = profile_activations(network, SMALL)
    # 1 + 1e-4 is 1 in float16: all values are zero already.
    assert report.first.place.cell == ("log1p" if level == "by hand" else "_backbone.log1p")
    assert (report.first.kind, report.first.dtype) == ("output", "Float16")
    assert report.first.distribution.is_all_zero and report.first.is_notable


def test_float16_values_agree_with_numpy_and_a_users_hooks_stay():
    network, values = Softplus(bias=-7.6).to_float(mstype.float16), {}
    names = ("head", "log1p", "tail")
    for name in names:

        def hook(_cell, _inputs, output, name=name):
            values.setdefault(name, []).append(output.asnumpy().ravel())

        getattr(network, name).register_forward_hook(hook)
    with in_mode(mindspore.PYNATIVE_MODE):
        for inputs in SMALL:
            network(*inputs)
    expected = {name: np.concatenate(values[name]) for name in names}
    with untouched(network):
        report = profile_activations(network, SMALL)
    assert report.batches == 2
    for name in names:
        assert expected[name].dtype == np.float16
        assert of(report, name).dtype == "Float16"
        assert of(report, name).distribution.as_dict() == counts_of(expected[name].astype(np.float32))
        # The hook was called by the diagnosis, too.
        assert len(values[name]) == 2 * len(SMALL)


def test_gradients_are_counted_with_the_loss_scale():
    x, y = batch()
    network = nn.WithLossCell(nn.Dense(FEATURES, 1, weight_init="ones", has_bias=False), nn.MSELoss())
    for loss_scale in (1.0, 2.0**10):
        report = profile_activations(network, [(x, y)], loss_scale=loss_scale)
        expected = 2 / len(x) * (x.asnumpy().sum(axis=1, keepdims=True) - y.asnumpy()) * loss_scale
        distribution = of(report, "_backbone", "gradient").distribution
        np.testing.assert_allclose(distribution.min, np.abs(expected).min(), rtol=1e-4)
        np.testing.assert_allclose(distribution.max, np.abs(expected).max(), rtol=1e-4)
        assert of(report, "WithLossCell", "gradient").distribution.max == report.loss_scale == loss_scale


@pytest.mark.parametrize(
    "make, scales",
    [
        (scaled, [2.0**10]),
        (lambda: gan("alternating", [DynamicLossScale(2.0**10), 2.0**4]), [2.0**10, 2.0**4]),
        *slow((lambda: gan("simultaneous"), [2.0**10] * 2)),
    ],
)
def test_a_training_cell_is_profiled_at_its_own_scales_and_nothing_changes(make, scales):
    cell, batches, _ = make()
    roots = [f"networks[{i}]" for i in range(2)] if len(scales) == 2 else [type(cell.network).__name__]

    def largest(report):
        return [of(report, root, "gradient").distribution.max for root in roots]

    with untouched(cell.set_train()):
        report = profile_activations(cell, batches)
    assert largest(report) == scales
    assert report.loss_scale == (scales if len(set(scales)) == 2 else scales[0])
    written = " and ".join(f"{scale:.0f}" for scale in dict.fromkeys(scales))
    assert f"gradients at loss scale {written}; " in str(report)
    assert json.loads(report.to_json())["loss_scale"] == report.loss_scale
    if cell.forward_state_names():
        assert str(report).splitlines()[-1] == f"A skipped step restores: {', '.join(report.forward_state)}."
    assert report.forward_state == cell.forward_state_names()
    report = profile_activations(cell, batches, loss_scale=2.0)
    assert (report.loss_scale, largest(report)) == (2.0, [2.0] * len(scales))


class Twice(nn.Cell):
    """Calls a cell twice, and one that returns nested tuples."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, FEATURES, weight_init="ones", has_bias=False)
        self.lstm = nn.LSTM(FEATURES, 2)

    def construct(self, x):
        output, (hidden, cell) = self.lstm(self.dense(self.dense(x))[:, None])
        return output.sum() + hidden.sum() + cell.sum()


def test_calls_and_items_are_told_apart():
    report = profile_activations(Twice(), [BATCHES[0][0]])
    names = [str(each.place) for each in report.activations if each.kind == "output" and "rnn" not in each.place.cell]
    assert names == ["dense", "dense (call 2)", "lstm", "lstm [1]", "lstm [2]", "Twice"]
    first, second = (of(report, "dense", "gradient", call).distribution.max for call in range(2))
    # All rows of a gradient are its sum after a layer of ones.
    assert first != second


class Compiled(nn.Cell):
    """A cell whose construct is compiled in PyNative mode too."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 4, weight_init="ones")

    @mindspore.jit
    def construct(self, x):
        return self.dense(x)


@quick_in_graph_mode
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
