"""The steps of docs/own_steps.md: each against a step in NumPy, in float64, and with an overflow in the worst place."""

import re

import mindspore
import numpy as np
import pytest
from conftest import nightly, slow
from mindspore import Tensor, ops
from support.in_mode import in_mode
from support.python_process import ROOT, import_code
from support.reference import DynamicRule

from ms_lossscale import DynamicLossScale, SimultaneousTrainOneStepCell

PAGE = (ROOT / "docs" / "own_steps.md").read_text()
SECTIONS = dict(re.findall(r"^```python\n# (.+?)\n(.*?)^```", PAGE, re.S | re.M))
SET_UP = SECTIONS.pop("Set-up")
DIFF = re.search(r"^```diff\n(.*?)^```", PAGE, re.S | re.M)[1]

# Each with the mode, and whether what the page compiles is compiled.
WAYS = {
    "eager": (mindspore.PYNATIVE_MODE, False),
    "graph": (mindspore.GRAPH_MODE, True),
    "pynative": (mindspore.PYNATIVE_MODE, True),
}


@pytest.fixture
def way(request):
    mode, _ = WAYS[request.param]
    with in_mode(mode):
        yield request.param


quick_when_eager = pytest.mark.parametrize("way", ["eager", *slow("graph"), *nightly("pynative")], indirect=True)
in_each_way = pytest.mark.parametrize("way", [*slow("eager", "graph"), *nightly("pynative")], indirect=True)


def import_step(folder, way, code, *replace):
    """Imports the code of a section after the set-up. `replace` has pairs of what to replace in it and by what."""
    for old, new in replace:
        assert old in code
        code = code.replace(old, new)
    code = SET_UP + code
    module = import_code(folder, code if WAYS[way][1] else code.replace("@mindspore.jit\n", ""))
    # An input of which the outputs do not depend: where it is large, gradients overflow, and nothing else.
    weight = module.net[0].weight.asnumpy().copy()
    weight[:, 3] = 0
    module.net[0].weight.set_data(Tensor(weight))
    return module


def make_batches(count=6, seed=0):
    rng = np.random.default_rng(seed)
    batches = [[rng.normal(size=(8, size)).astype(np.float32) for size in (4, 2)] for _ in range(count)]
    for x, _ in batches:
        x[:, 3] = 0
    return batches


# The place of the batch that overflows.
OVERFLOWS = 3


def network(weights, x):
    """The page's network. With complex weights it is differentiated by a complex step, which rounds like a forward."""
    first, first_bias, second, second_bias = weights
    return np.tanh(x @ first.T + first_bias) @ second.T + second_bias


def mean_squared_error(weights, x, y):
    return ((network(weights, x) - y) ** 2).mean()


def gradients(loss_of, arrays, *inputs):
    """Differentiates by arrays, in float64, without a formula for the gradient."""
    step = 1e-100
    inputs = [each.astype(np.float64) for each in inputs]
    grads = []
    for i, array in enumerate(arrays):
        grad = np.empty(array.shape)
        for index in np.ndindex(array.shape):
            moved = [each.astype(np.complex128) for each in arrays]
            moved[i][index] += step * 1j
            grad[index] = loss_of(moved, *inputs).imag / step
        grads.append(grad)
    return grads


def norm(grads):
    return np.sqrt(sum((grad**2).sum() for grad in grads))


class Momentum:
    """nn.Momentum of the page, in float64."""

    def __init__(self, module):
        self.weights = [weight.asnumpy().astype(np.float64) for weight in module.weights]
        self.velocities = [np.zeros_like(weight) for weight in self.weights]

    def update(self, grads):
        self.velocities = [0.9 * velocity + grad for velocity, grad in zip(self.velocities, grads)]
        self.weights = [weight - 0.05 * velocity for weight, velocity in zip(self.weights, self.velocities)]


def state(module):
    """All that a skipped step must leave alone, by name."""
    further = [getattr(module, name) for name in ("shares", "first_losses") if hasattr(module, name)]
    parameters = {parameter.name: parameter for parameter in [*module.step.get_parameters(), *further]}
    changes = ("loss_scale", "step_counters.")
    return {name: each.asnumpy().tobytes() for name, each in parameters.items() if not name.startswith(changes)}


def assert_close(actual, expected):
    """Each of a few updates rounds a few sums of float32: 2**-24 = 6e-8 of numbers of about 1."""
    for its, its_expected in zip(actual, expected):
        np.testing.assert_allclose(its.asnumpy(), its_expected, rtol=TOLERANCE, atol=TOLERANCE)


TOLERANCE = 2e-6


def train(module, batches, train_step, control_step, control):
    """Trains with each batch. `control_step` updates the control; the batch that overflows must change nothing."""
    rule = DynamicRule(2.0**16, 2000)
    for number, (x, y) in enumerate(batches):
        before = state(module)
        overflow = bool(train_step(number, Tensor(x), Tensor(y)))
        assert overflow is (number == OVERFLOWS)
        rule.step(overflow)
        if overflow:
            assert state(module) == before
        else:
            control_step(number, x, y)
            assert_close(module.weights, control.weights)
        assert module.step.get_loss_scale() == rule.scale
    applied = len(batches) - 1
    assert module.step.counters() == {"applied_steps": applied, "skipped_steps": 1, "consecutive_skipped_steps": 0}
    assert len(before) >= 8  # Weights and moments.


@quick_when_eager
def test_a_functional_loop(way, tmp_path):
    """Bit for bit MindSpore's loop, which is the other side of the page's difference."""

    def side(sign):
        return "".join(f"{line[1:]}\n" for line in DIFF.splitlines() if line[:1] in ("", " ", sign))

    batches = make_batches(8)
    batches[OVERFLOWS][0][7, 3] = 1e36
    compiled = ("def train_step", "@mindspore.jit\ndef train_step")
    stock = import_step(tmp_path, "eager", side("-"))
    ours = import_step(tmp_path, way, side("+"), compiled)
    scales = []
    for x, y in batches:
        loss, finite = stock.train_step(Tensor(x), Tensor(y))
        before = state(ours)
        its_loss, overflow = ours.train_step(Tensor(x), Tensor(y))
        assert bool(overflow) is not bool(finite)
        assert (state(ours) == before) is bool(overflow)
        assert its_loss.asnumpy() == loss.asnumpy()
        for weight, expected in zip(ours.weights, stock.weights):
            assert weight.asnumpy().tobytes() == expected.asnumpy().tobytes()
        scales.append(ours.step.get_loss_scale())
        assert scales[-1] == float(stock.scaler.scale_value)
    assert scales == [2.0**each for each in (16, 16, 17, 16, 16, 16, 17, 17)]


@quick_when_eager
def test_sam(way, tmp_path):
    """The first backward is clean, its step uphill leads to where the second one overflows."""
    module = import_step(tmp_path, way, SECTIONS["SAM"])
    control = Momentum(module)

    def train_step(number, x, y):
        return module.train_step(x, y, 1e36 if number == OVERFLOWS else 0.05)[1]

    def control_step(number, x, y):
        grads = gradients(mean_squared_error, control.weights, x, y)
        uphill = [weight + 0.05 / norm(grads) * grad for weight, grad in zip(control.weights, grads)]
        control.update(gradients(mean_squared_error, uphill, x, y))

    train(module, make_batches(), train_step, control_step, control)


@pytest.mark.parametrize("way", ["eager"], indirect=True)
def test_sam_after_an_error_while_the_weights_are_moved(way, tmp_path):
    modules = [import_step(tmp_path, way, SECTIONS["SAM"]) for _ in range(2)]
    batches = [[Tensor(each) for each in batch] for batch in make_batches(2)]
    for number, module in enumerate(modules):
        module.train_step(*batches[0])
        if number == 0:
            before, loss_fn, calls = module.weights[2].asnumpy().copy(), module.loss_fn, []

            def fails(outputs, y, loss_fn=loss_fn, calls=calls):
                calls.append(y)
                if len(calls) == 2:
                    raise InterruptedError
                return loss_fn(outputs, y)

            module.loss_fn = fails
            with pytest.raises(InterruptedError):
                module.train_step(*batches[1])
            assert (module.weights[2].asnumpy() != before).any()
            module.loss_fn = loss_fn
        module.train_step(*batches[1])
    assert state(modules[0]) == state(modules[1])


@in_each_way
def test_a_gan(way, tmp_path):
    """Against the training cell with two networks, to the last bit; the fourth batch overflows."""
    module, other = (import_step(tmp_path, way, SECTIONS["A GAN"]) for _ in "ab")

    def d_loss(real, noise):
        fake = ops.stop_gradient(other.generator(noise))
        return ops.square(other.discriminator(real) - 1).mean() + ops.square(other.discriminator(fake)).mean()

    def g_loss(noise):
        return ops.square(other.discriminator(other.generator(noise)) - 1).mean()

    cell = SimultaneousTrainOneStepCell(
        [d_loss, g_loss],
        [other.d_optimizer, other.g_optimizer],
        DynamicLossScale(2.0**16),
        network_inputs=[(0, 1), (1,)],
    ).set_train()
    for name in ("discriminator", "generator"):
        for mine, its in zip(getattr(module, name).get_parameters(), getattr(other, name).get_parameters()):
            its.set_data(Tensor(mine.asnumpy().copy()))
    rng = np.random.default_rng(0)
    for number in range(6):
        real, noise = (Tensor(rng.normal(size=(8, size)).astype(np.float32)) for size in (4, 2))
        if number == OVERFLOWS:
            noise = noise * 1e30
        *losses, overflow = module.train_step(real, noise)
        _, expected, _, each_loss = cell(real, noise)
        assert bool(overflow) is bool(expected) is (number == OVERFLOWS)
        if not overflow:
            np.testing.assert_array_equal([float(loss) for loss in losses], each_loss.asnumpy())
        for name in ("discriminator", "generator"):
            for mine, its in zip(getattr(module, name).get_parameters(), getattr(other, name).get_parameters()):
                np.testing.assert_array_equal(mine.asnumpy(), its.asnumpy())
    assert module.step.get_loss_scale() == cell.get_loss_scale() == 2.0**15


@in_each_way
def test_gradient_surgery(way, tmp_path):
    """The second loss overflows, the first does not."""
    module = import_step(tmp_path, way, SECTIONS["Gradient surgery"])
    control, conflicts = Momentum(module), []

    def error(task):
        return lambda weights, x, y: ((network(weights, x)[:, task] - y[:, task]) ** 2).mean()

    def control_step(number, x, y):
        first, second = (
            np.concatenate([g.ravel() for g in gradients(error(i), control.weights, x, y)]) for i in (0, 1)
        )
        conflicts.append(first @ second < 0)
        total = first + second
        if conflicts[-1]:
            total = first - first @ second / (second @ second) * second
            total = total + second - first @ second / (first @ first) * first
        sizes = np.cumsum([weight.size for weight in control.weights])[:-1]
        parts = np.split(total, sizes)
        control.update([part.reshape(weight.shape) for part, weight in zip(parts, control.weights)])

    batches = make_batches()
    batches[OVERFLOWS][1][:, 1] = 1e36
    train(module, batches, lambda number, x, y: module.train_step(x, y), control_step, control)
    assert set(conflicts) == {True, False}


def clipped_mean(control, x, y):
    total, norms = [np.zeros_like(weight) for weight in control.weights], []
    for sample in range(len(x)):
        its = slice(sample, sample + 1)
        grads = gradients(mean_squared_error, control.weights, x[its], y[its])
        norms.append(norm(grads))
        total = [each + min(1, 2.0 / norms[-1]) * grad for each, grad in zip(total, grads)]
    assert min(norms) < 2.0 < max(norms)
    return [each / len(x) for each in total]


@in_each_way
def test_per_sample_clipping(way, tmp_path):
    """The gradient of one sample overflows: clipped to nothing, it would not show in the mean."""
    module = import_step(tmp_path, way, SECTIONS["Per-sample clipping"])
    control = Momentum(module)
    batches = make_batches()
    batches[OVERFLOWS][0][7, 3] = 1e36

    def control_step(number, x, y):
        control.update(clipped_mean(control, x, y))

    train(module, batches, lambda number, x, y: module.train_step(x, y)[1], control_step, control)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager"], indirect=True)
def test_the_noise_of_dp_sgd(way, tmp_path, monkeypatch):
    """With the noise that it drew; a skipped step adds none."""
    module = import_step(tmp_path, way, SECTIONS["Per-sample clipping"], ("2.0, 0.0", "2.0, 1.5"))
    control, drawn = Momentum(module), []
    standard_normal = module.ops.standard_normal

    def draw(shape):
        drawn.append(standard_normal(shape))
        return drawn[-1]

    monkeypatch.setattr(module.ops, "standard_normal", draw)
    batches = make_batches()
    batches[OVERFLOWS][1][7] = 1e36

    def control_step(number, x, y):
        noise = [each.asnumpy() for each in drawn[-len(control.weights) :]]
        means = clipped_mean(control, x, y)
        control.update([mean + 1.5 * 2.0 / len(x) * its for mean, its in zip(means, noise)])

    train(module, batches, lambda number, x, y: module.train_step(x, y)[1], control_step, control)


@in_each_way
def test_grad_norm(way, tmp_path):
    """The gradients stay finite, but their norms do not: what is lost are the shares."""
    module = import_step(tmp_path, way, SECTIONS["GradNorm"])
    control, shares, firsts = Momentum(module), np.ones(2), []
    batches = make_batches()
    batches[OVERFLOWS] = (batches[OVERFLOWS][0], batches[OVERFLOWS][1] * np.float32(1e18))

    def losses(weights, x, y):
        return ((network(weights, x) - y) ** 2).mean(0)

    def control_step(number, x, y):
        nonlocal shares
        each = losses(control.weights, x.astype(np.float64), y)
        firsts.append(each)
        of_tasks = [gradients(lambda *its, task=task: losses(*its)[task], control.weights, x, y) for task in (0, 1)]
        norms = np.array([np.linalg.norm(grads[0]) for grads in of_tasks])
        pace = each / firsts[0]
        weighted = shares * norms
        control.update([shares[0] * a + shares[1] * b for a, b in zip(*of_tasks)])
        moved = shares - 0.025 * np.sign(weighted - weighted.mean() * (pace / pace.mean()) ** 1.5) * norms
        shares = 2 * moved / moved.sum()
        assert_close([module.shares], [shares])

    train(module, batches, lambda number, x, y: module.train_step(x, y)[1], control_step, control)
    assert abs(shares[0] - 1) > 0.01


@in_each_way
def test_a_large_contrastive_batch(way, tmp_path):
    """Only the last piece overflows, where its gradient is carried on to the weights."""
    module = import_step(tmp_path, way, SECTIONS["A large contrastive batch"])
    control = Momentum(module)
    rng = np.random.default_rng(1)
    batches = [(x, (x + rng.normal(size=x.shape) * 0.1).astype(np.float32)) for x, _ in make_batches()]
    for _, other in batches:
        other[:, 3] = 0
    batches[OVERFLOWS][1][7, 3] = 1e36

    def contrast(weights, a, b):
        logits = network(weights, a) @ network(weights, b).T
        return (np.log(np.exp(logits).sum(1)) - np.diag(logits)).mean()

    def control_step(number, x, y):
        control.update(gradients(contrast, control.weights, x, y))

    train(module, batches, lambda number, x, y: module.train_step(x, y)[1], control_step, control)


@in_each_way
def test_lazy_regularisation(way, tmp_path):
    """The step of the regulariser overflows."""
    every = ("number % 16", "number % 3")
    module = import_step(tmp_path, way, SECTIONS["Lazy regularisation"], every, ("16 * gamma", "3 * gamma"))
    control = Momentum(module)
    batches = make_batches(8)
    batches[OVERFLOWS][0][7, 3] = 1e36

    def with_r1(weights, x, y):
        first, first_bias, second, _ = weights
        hidden = np.tanh(x @ first.T + first_bias)
        slopes = (second.sum(0) * (1 - hidden**2)) @ first
        return mean_squared_error(weights, x, y) + 3 * 0.1 / 2 * (slopes**2).sum(1).mean()

    def control_step(number, x, y):
        loss_of = mean_squared_error if number % 3 else with_r1
        control.update(gradients(loss_of, control.weights, x, y))

    train(module, batches, lambda *inputs: module.train_step(*inputs)[1], control_step, control)


@in_each_way
def test_an_attempt_of_your_own(way, tmp_path):
    """The third attempt succeeds; of another batch, none does."""
    module = import_step(tmp_path, way, SECTIONS["An attempt of your own"])
    control = Momentum(module)
    (x, y), (hopeless, its_y) = make_batches(2)
    hopeless[7, 3] = 1e38
    before = state(module)
    assert bool(module.train_step(Tensor(hopeless), Tensor(its_y))[1])
    assert state(module) == before
    assert module.step.get_loss_scale() == 2.0**12
    module.step.set_loss_scale(2.0**16)
    x[0, 3] = 1
    largest = np.abs(gradients(mean_squared_error, control.weights, x, y)[0][:, 3]).max()
    x[0, 3] = np.finfo(np.float32).max / (2.0**14.5 * largest)
    assert not bool(module.train_step(Tensor(x), Tensor(y))[1])
    control.update(gradients(mean_squared_error, control.weights, x, y))
    assert_close(module.weights, control.weights)
    assert module.step.get_loss_scale() == 2.0**14
    assert module.step.counters() == {"applied_steps": 1, "skipped_steps": 6, "consecutive_skipped_steps": 0}


@in_each_way
def test_two_optimizers_with_one_norm(way, tmp_path):
    """The gradient of a matrix overflows: the other optimizer must not move either."""
    module = import_step(tmp_path, way, SECTIONS["Two optimizers with one norm"])
    control = Momentum(module)
    moments = [[np.zeros_like(weight) for weight in control.weights] for _ in range(2)]
    batches = make_batches()
    batches[OVERFLOWS][0][7, 3] = 1e36

    def control_step(number, x, y):
        grads = gradients(mean_squared_error, control.weights, x, y)
        assert norm(grads) > 0.5
        grads = [0.5 / norm(grads) * grad for grad in grads]
        before = control.weights
        control.update(grads)
        for i in (1, 3):
            moments[0][i] = 0.9 * moments[0][i] + 0.1 * grads[i]
            moments[1][i] = 0.999 * moments[1][i] + 0.001 * grads[i] ** 2
            control.weights[i] = before[i] - 1e-3 * moments[0][i] / (np.sqrt(moments[1][i]) + 1e-6)

    train(module, batches, lambda number, x, y: module.train_step(x, y)[1], control_step, control)


def test_every_step_of_the_page_is_tested():
    """A step that is added to the page needs a test of its own above."""
    assert len(SECTIONS) == 9
