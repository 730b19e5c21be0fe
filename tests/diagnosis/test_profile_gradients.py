"""profile_gradients counts exactly the gradients of a network or of a training cell, and leaves all as it was."""

import io
import sys
import time

import mindspore
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor, dataset, nn, ops
from mindspore import dtype as mstype
from support.gan_networks import (
    NETWORK_INPUTS,
    GanLosses,
    WithAux,
    gan_batch,
    generator_and_discriminator,
    rows_of,
    take,
    two_losses,
    two_optimizers,
)
from support.networks import FEATURES, HalfPrecision, Linear, LossOfShape, Mlp, Normalised, batch, overflowing_batch
from support.numpy_casts import counts_of, shares_of_cast
from support.training import changed, restore, state
from support.untouched import untouched

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    profile_gradients,
)

pytestmark = pytest.mark.slow

BATCHES = [batch(seed) for seed in range(3)]


class Float16Layers(nn.Cell):
    """Two layers that compute in float16, with a float32 loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(FEATURES, 5, weight_init="ones"), nn.Tanh(), nn.Dense(5, 1, "ones"))
        self.layers.to_float(mstype.float16)

    def construct(self, x, y):
        return ops.square(self.layers(x).astype(mstype.float32) - y).mean()


def gradients_of(loss, weights, batches, loss_scale=1.0):
    """From each weight's name to its unscaled gradients over all batches, computed here."""
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    grad = ops.value_and_grad(
        lambda *inputs: loss(*inputs).astype(mstype.float32) * loss_scale, None, ParameterTuple(weights)
    )
    grads = {weight.name: [] for weight in weights}
    for inputs in batches:
        for weight, each in zip(weights, grad(*inputs)[1]):
            grads[weight.name].append(each.asnumpy().astype(np.float32).ravel() / np.float32(loss_scale))
    mindspore.set_context(mode=mode)
    return {name: np.concatenate(arrays) for name, arrays in grads.items()}


def assert_counts(report, grads):
    assert {name: each.as_dict() for name, each in report.parameters.items()} == {
        name: counts_of(values) for name, values in grads.items()
    }
    together = np.concatenate(list(grads.values()))
    assert report.total.as_dict() == counts_of(together)
    for scale, shares in report.shares().items():
        assert shares == shares_of_cast(together, scale)
    for scale, shares in report.shares(mstype.bfloat16).items():
        assert shares == shares_of_cast(together, scale, mstype.bfloat16)


def test_agrees_with_numpy(mode):
    network = Linear()
    weight = network.weight.asnumpy()
    expected = []
    for x, y in [(x.asnumpy(), y.asnumpy()) for x, y in BATCHES]:
        expected.append(2 / len(x) * x.T @ (x @ weight - y))
    distribution = profile_gradients(network, [network.weight], BATCHES).parameters["weight"]
    assert (distribution.count, distribution.zeros, distribution.non_finite) == (3 * FEATURES, 0, 0)
    np.testing.assert_allclose(distribution.min, np.abs(expected).min(), rtol=1e-5)
    np.testing.assert_allclose(distribution.max, np.abs(expected).max(), rtol=1e-5)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**12, 2.0**-12])
@pytest.mark.parametrize("make", [Mlp, Normalised, HalfPrecision, Float16Layers], ids=lambda make: make.__name__)
def test_counts_the_gradients_of_a_network(make, loss_scale):
    network = make().set_train()
    weights = network.trainable_params()
    grads = gradients_of(network, weights, BATCHES, loss_scale)
    report = profile_gradients(network, weights, BATCHES, loss_scale=loss_scale)
    assert (report.batches, report.loss_scale, report.clip, report.step) == (3, loss_scale, None, None)
    assert report.non_finite_losses == 0
    assert report.largest == max(np.abs(values).max() for values in grads.values())
    assert_counts(report, grads)


@pytest.mark.parametrize("shape", [(4, 1), (1,)])
def test_a_loss_that_is_no_scalar_enters_as_its_sum(shape):
    network = LossOfShape(shape)
    grads = gradients_of(lambda *inputs: network(*inputs).sum(), network.trainable_params(), BATCHES)
    assert_counts(profile_gradients(network, batches=BATCHES), grads)


FORMS = {
    "tensors": lambda: BATCHES,
    "lists": lambda: [list(inputs) for inputs in BATCHES],
    "arrays": lambda: rows_of(BATCHES),
    "generator": lambda: (inputs for inputs in BATCHES),
    "dataset": lambda: dataset.NumpySlicesDataset(
        tuple(np.concatenate(column) for column in zip(*rows_of(BATCHES))), ["x", "y"], shuffle=False
    ).batch(4),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_batches(form):
    network = Mlp()
    report = profile_gradients(network, network.trainable_params(), FORMS[form]())
    assert report.batches == 3
    assert_counts(report, gradients_of(network, network.trainable_params(), BATCHES))


def test_clip():
    network = Mlp()
    weights = network.trainable_params()
    clip, clipped, largest = 0.5, {weight.name: [] for weight in weights}, []
    # The last batch is within the bound.
    x, _ = batch(3)
    batches = [*BATCHES, (x, network_output(network, x) + 1e-3)]
    for inputs in batches:
        grads = gradients_of(network, weights, [inputs])
        norm = np.sqrt(sum(np.sum(np.square(values.astype(np.float64))) for values in grads.values()))
        largest.append((norm, max(np.abs(values).max() for values in grads.values())))
        for name, values in grads.items():
            clipped[name].append(values * np.float32(clip / norm) if norm > clip else values)
    assert max(largest)[0] > clip > min(largest)[0]
    report = profile_gradients(network, weights, batches, clip=clip)
    assert report.clip == clip
    assert report.largest == max(each for _, each in largest)
    assert_counts(report, {name: np.concatenate(arrays) for name, arrays in clipped.items()})


def network_output(network, x):
    hidden = ops.tanh(ops.matmul(x, network.hidden) + network.hidden_bias)
    return ops.matmul(hidden, network.output) + network.output_bias


def test_clipping_hides_no_overflow():
    network = Linear()
    report = profile_gradients(network, batches=[BATCHES[0], overflowing_batch()], clip=1e-3)
    assert report.parameters["weight"].non_finite > 0
    assert report.non_finite_losses == 1


# The training cells.


def scaled():
    network = Normalised().set_train()
    cell = ScaledTrainOneStepCell(network, nn.Adam(network.trainable_params()), DynamicLossScale(2.0**10))
    return cell, BATCHES, [(network, network.trainable_params(), BATCHES)]


def gan(kind, loss_scale=2.0**10, **keywords):
    networks = generator_and_discriminator()
    batches = [gan_batch(seed) for seed in range(2)]
    own = [network.trainable_params() for network in networks]
    losses = two_losses(*networks)
    if kind == "tuple":
        both = GanLosses(*networks)
        cell = SimultaneousTrainOneStepCell(both, two_optimizers(*networks), loss_scale, **keywords)
        expected = [(lambda *inputs, i=i: both(*inputs)[i], own[i], batches) for i in range(2)]
        return cell, batches, expected
    make = SimultaneousTrainOneStepCell if kind == "simultaneous" else AlternatingTrainOneStepCell
    its_losses = [WithAux(loss) for loss in losses] if keywords.get("has_aux") else losses
    cell = make(its_losses, two_optimizers(*networks), loss_scale, network_inputs=NETWORK_INPUTS, **keywords)
    expected = [(losses[i], own[i], [take(NETWORK_INPUTS[i], inputs) for inputs in batches]) for i in range(2)]
    return cell, batches, expected


def with_aux():
    network = Mlp()
    cell = ScaledTrainOneStepCell(WithAux(network), nn.Adam(network.trainable_params()), has_aux=True)
    return cell, BATCHES, [(network, network.trainable_params(), BATCHES)]


CELLS = {
    "scaled": scaled,
    "with aux": with_aux,
    "simultaneous": lambda: gan("simultaneous"),
    "simultaneous with aux": lambda: gan("simultaneous", has_aux=True),
    "tuple": lambda: gan("tuple"),
    "alternating": lambda: gan("alternating", every=(1, 2)),
    "alternating, accumulating": lambda: gan("alternating", gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_counts_the_gradients_of_a_training_cell(make):
    cell, batches, parts = make()
    cell.set_train()
    grads = {}
    for loss, weights, its_batches in parts:
        grads.update(gradients_of(loss, weights, its_batches))
    report = profile_gradients(cell, batches)
    assert (report.batches, report.step) == (len(batches), 0)
    assert_counts(report, grads)
    # The other way to pass the batches.
    assert profile_gradients(cell, batches=batches).to_json() == report.to_json()


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_nothing_changes(mode, make):
    cell, batches, _ = make()
    with untouched(cell):
        profile_gradients(cell, batches)
    cell.set_train()
    with untouched(cell):
        profile_gradients(cell, batches)


@pytest.mark.parametrize("kind", ["scaled", "tuple", "alternating"])
def test_training_goes_on_as_without(mode, kind):
    cell, batches, _ = CELLS[kind]()
    cell.set_train()
    cell(*batches[0])
    before = state(cell)

    def after_another_step():
        loss = cell(*batches[1])[0]
        return {**state(cell), "loss": loss.asnumpy()}

    without = after_another_step()
    restore(cell, before)
    profile_gradients(cell, batches)
    assert not changed(without, after_another_step())


def test_a_frozen_cell_stays_frozen():
    network = Normalised().set_train()
    network.norm.set_train(False)
    grads = gradients_of(network, network.trainable_params(), BATCHES)
    assert_counts(profile_gradients(network, batches=BATCHES), grads)


@pytest.mark.parametrize("kind", ["scaled", "alternating"])
def test_the_step_of_a_training_cell(kind):
    cell, batches, _ = scaled() if kind == "scaled" else gan("alternating", every=(1, 2))
    for inputs in batches:
        cell(*inputs)
    if kind == "scaled":
        # A skipped one counts, too.
        cell(*overflowing_batch())
    assert profile_gradients(cell, batches).step == (4 if kind == "scaled" else 2)


class Compiled(nn.Cell):
    """A network whose construct is compiled in PyNative mode too."""

    def __init__(self):
        super().__init__()
        self.network = Mlp()

    @mindspore.jit
    def construct(self, x, y):
        return self.network(x, y)


def test_a_compiled_network(mode):
    network = Compiled()
    weights = network.trainable_params()
    with untouched(network):
        report = profile_gradients(network, weights, BATCHES)
    assert_counts(report, gradients_of(network, weights, BATCHES))


# The progress bar.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def slow_batches(seconds):
    for inputs in BATCHES:
        time.sleep(seconds)
        yield inputs


@pytest.mark.parametrize("seconds, terminal, shown", [(0.7, True, True), (0.0, True, False), (0.7, False, False)])
def test_a_progress_bar_on_long_profiles_at_a_terminal(seconds, terminal, shown, monkeypatch):
    pytest.importorskip("tqdm", reason="the progress bar needs tqdm")
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    profile_gradients(Linear(), batches=slow_batches(seconds))
    assert ("profile_gradients" in stream.getvalue()) == shown


# Bad input.


class Failing(nn.Cell):
    """Fails on the second batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.linear = Linear()

    def construct(self, x, y):
        return self.linear(self.norm(x), y)


def wrong_shape():
    return Tensor(np.ones((4, FEATURES + 1), np.float32)), BATCHES[0][1]


def test_a_forward_that_fails(mode):
    network = Failing()
    message = r"For 'profile_gradients', the network fails on batches\[1\] in PyNative mode, in which "
    with untouched(network), pytest.raises(RuntimeError, match=message):
        profile_gradients(network, network.trainable_params(), [BATCHES[0], wrong_shape()])


def test_a_network_that_returns_no_loss():
    network = WithAux(Linear())
    with pytest.raises(
        RuntimeError, match=r"batches\[0\].*Network 0 must return a Tensor, the loss, but it returned \(Tensor of shape"
    ):
        profile_gradients(network, network.trainable_params(), BATCHES)


NETWORK = Linear()


@pytest.mark.parametrize(
    "arguments, keywords, error, message",
    [
        ((NETWORK, [NETWORK.weight], []), {}, ValueError, "'batches' must not be empty"),
        ((NETWORK, [NETWORK.weight], iter(())), {}, ValueError, "'batches' must not be empty"),
        ((NETWORK, [NETWORK.weight]), {}, TypeError, "'batches' must be an iterable of batches, but got None"),
        ((NETWORK,), {}, TypeError, "'batches' must be an iterable of batches, but got None"),
        ((NETWORK, BATCHES), {}, TypeError, r"'parameters' must be a list of the network's Parameters, but got \[\("),
        ((NETWORK, [NETWORK.weight], BATCHES[0][0]), {}, TypeError, "'batches' must be an iterable of batches, but go"),
        ((NETWORK, [NETWORK.weight], [(1, 2)]), {}, TypeError, r"'batches\[0\]' must be a Tensor.*but got \(1, 2\)"),
        ((NETWORK, [], BATCHES), {}, ValueError, "'parameters' must be .*, but it is empty"),
        ((NETWORK, "weight", BATCHES), {}, TypeError, "'parameters' must be .*, but got 'weight'"),
        ((NETWORK, Mlp().trainable_params(), BATCHES), {}, ValueError, "the network does not have hidden.weight, hid"),
        (("network", None, BATCHES), {}, TypeError, "'network' must be a Cell, but got 'network'"),
        ((NETWORK, None, BATCHES), {"loss_scale": 0.0}, ValueError, "'loss_scale' must be a finite number > 0"),
        ((NETWORK, None, BATCHES), {"loss_scale": "1"}, TypeError, "'loss_scale' must be a number"),
        ((NETWORK, None, BATCHES), {"clip": 0.0}, ValueError, "'clip' must be a number > 0, but got 0.0"),
        ((NETWORK, None, BATCHES), {"clip": float("nan")}, ValueError, "'clip' must be a number > 0, but got nan"),
        ((NETWORK, None, BATCHES), {"clip": "1"}, TypeError, "'clip' must be a number"),
        ((nn.ReLU(), None, BATCHES), {}, ValueError, "the network has no trainable parameters"),
    ],
)
def test_wrong_arguments(arguments, keywords, error, message):
    with pytest.raises(error, match=f"For 'profile_gradients', .*{message}"):
        profile_gradients(*arguments, **keywords)


def test_a_training_cell_knows_its_parameters():
    cell, batches, _ = scaled()
    with pytest.raises(ValueError, match="'parameters' must be None for a training cell"):
        profile_gradients(cell, cell.network.trainable_params(), batches)
    with pytest.raises(TypeError, match="'batches' must be an iterable of batches, but got None"):
        profile_gradients(cell)


@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
def test_a_position_that_is_not_there(kind):
    cell, _, _ = gan(kind)
    message = r"batches\[0\].*gives network 1 the input at position 3, but the cell was called with 3 inputs"
    with pytest.raises(RuntimeError, match=message):
        profile_gradients(cell, [gan_batch()[:3]])
