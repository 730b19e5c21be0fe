"""The steps of docs/own_steps.md: each against a step in NumPy, in float64, and with an overflow in the worst place."""

import re

import mindspore
import numpy as np
import pytest
from conftest import nightly, slow
from mindspore import Tensor
from support.in_mode import in_mode
from support.python_process import ROOT, import_code
from support.reference import DynamicRule

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
# The place of the batch that overflows.
OVERFLOWS = 3
# Each of a few updates rounds a few sums of float32: 2**-24 = 6e-8 of numbers of about 1.
TOLERANCE = 2e-6


@pytest.fixture(params=[*slow("eager", "graph"), *nightly("pynative")])
def way(request):
    with in_mode(WAYS[request.param][0]):
        yield request.param


def import_step(folder, way, code, replace=()):
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


def make_batches(count=7, width=2):
    rng = np.random.default_rng(0)
    batches = [[rng.normal(size=(8, size)).astype(np.float32) for size in (4, width)] for _ in range(count)]
    for x, y in batches:
        x[:, 3] = y[:, 3:] = 0
    return batches


def network(weights, x):
    """The page's network. With complex weights it is differentiated by a complex step, which rounds like a forward."""
    first, first_bias, second, second_bias = weights
    return np.tanh(x @ first.T + first_bias) @ second.T + second_bias


def errors(weights, x, y):
    """The mean squared error of each output."""
    return ((network(weights, x) - y) ** 2).mean(0)


def error(weights, x, y):
    return errors(weights, x, y).mean()


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


class Control:
    """The weights, under nn.Momentum of the page, in float64; what a section's step does to it is a function below."""

    def __init__(self, weights):
        self.weights = [weight.asnumpy().astype(np.float64) for weight in weights]
        self.velocities = [np.zeros_like(weight) for weight in self.weights]
        self.shares, self.first_losses = np.ones(2), None
        self.moments = [[np.zeros_like(weight) for weight in self.weights] for _ in range(2)]

    def update(self, grads):
        self.velocities = [0.9 * velocity + grad for velocity, grad in zip(self.velocities, grads)]
        self.weights = [weight - 0.05 * velocity for weight, velocity in zip(self.weights, self.velocities)]


def a_gan(control, number, real, noise):
    d, g = control.weights[:2], control.weights[2:]

    def judged(weights, images):
        return images @ weights[0].T + weights[1]

    def d_loss(weights, real, noise):
        return ((judged(weights, real) - 1) ** 2).mean() + (judged(weights, judged(g, noise)) ** 2).mean()

    def g_loss(weights, noise):
        return ((judged(d, judged(weights, noise)) - 1) ** 2).mean()

    control.update(gradients(d_loss, d, real, noise) + gradients(g_loss, g, noise))


def sam(control, number, x, y):
    grads = gradients(error, control.weights, x, y)
    uphill = [weight + 0.05 / norm(grads) * grad for weight, grad in zip(control.weights, grads)]
    control.update(gradients(error, uphill, x, y))


def gradient_surgery(control, number, x, y):
    of_tasks = [gradients(lambda *its, i=i: errors(*its)[i], control.weights, x, y) for i in (0, 1)]
    first, second = (np.concatenate([grad.ravel() for grad in grads]) for grads in of_tasks)
    total, against = first + second, min(first @ second, 0)
    total = total - against / (second @ second) * second - against / (first @ first) * first
    parts = np.split(total, np.cumsum([weight.size for weight in control.weights])[:-1])
    control.update([part.reshape(weight.shape) for part, weight in zip(parts, control.weights)])


def per_sample_clipping(control, number, x, y):
    # With noise that is 1 everywhere.
    total, norms = [np.full_like(weight, 1.5 * 2.0) for weight in control.weights], []
    for i in range(len(x)):
        grads = gradients(error, control.weights, x[i : i + 1], y[i : i + 1])
        norms.append(norm(grads))
        total = [each + min(1, 2.0 / norms[-1]) * grad for each, grad in zip(total, grads)]
    assert max(norms) > 2.0
    control.update([each / len(x) for each in total])


def grad_norm(control, number, x, y):
    losses = errors(control.weights, x.astype(np.float64), y)
    control.first_losses = losses if control.first_losses is None else control.first_losses
    of_tasks = [gradients(lambda *its, i=i: errors(*its)[i], control.weights, x, y) for i in (0, 1)]
    norms = np.array([np.linalg.norm(grads[0]) for grads in of_tasks])
    pace, shares = losses / control.first_losses, control.shares
    control.update([shares[0] * a + shares[1] * b for a, b in zip(*of_tasks)])
    target = (shares * norms).mean() * (pace / pace.mean()) ** 1.5
    moved = shares - 0.025 * np.sign(shares * norms - target) * norms
    control.shares = 2 * moved / moved.sum()


def contrastive(control, number, a, b):
    def contrast(weights, a, b):
        logits = network(weights, a) @ network(weights, b).T
        return (np.log(np.exp(logits).sum(1)) - np.diag(logits)).mean()

    control.update(gradients(contrast, control.weights, a, b))


def lazy_regularisation(control, number, x, y):
    def with_r1(weights, x, y):
        first, first_bias, second, _ = weights
        slopes = (second.sum(0) * (1 - np.tanh(x @ first.T + first_bias) ** 2)) @ first
        return error(weights, x, y) + 3 * 0.1 / 2 * (slopes**2).sum(1).mean()

    control.update(gradients(error if number % 3 else with_r1, control.weights, x, y))


def plain(control, number, x, y):
    control.update(gradients(error, control.weights, x, y))


def two_optimizers(control, number, x, y):
    grads = gradients(error, control.weights, x, y)
    assert norm(grads) > 0.5
    grads = [0.5 / norm(grads) * grad for grad in grads]
    before, (first, second) = control.weights, control.moments
    control.update(grads)
    for i in (1, 3):
        first[i] = 0.9 * first[i] + 0.1 * grads[i]
        second[i] = 0.999 * second[i] + 0.001 * grads[i] ** 2
        control.weights[i] = before[i] - 1e-3 * first[i] / (np.sqrt(second[i]) + 1e-6)


# What makes a batch overflow: which input, where in it, and the number there.
LARGE_INPUT = (0, np.s_[7, 3], 1e36)

# For each section, the step in NumPy, the overflow, and what to replace in the code.
STEPS = {
    "A GAN": (a_gan, (1, np.s_[:], 1e30), []),
    # The first backward is clean, its step uphill leads to where the second one overflows.
    "SAM": (sam, None, []),
    # Only the second loss overflows.
    "Gradient surgery": (gradient_surgery, (1, np.s_[:, 1], 1e36), []),
    # Clipped to nothing, the gradient of one sample would not show in the mean.
    "Per-sample clipping": (
        per_sample_clipping,
        (1, np.s_[7], 1e36),
        [("2.0, 0.0", "2.0, 1.5"), ("ops.standard_normal(mean.shape)", "ops.ones(mean.shape)")],
    ),
    # The gradients stay finite, but their norms do not: what is lost are the shares.
    "GradNorm": (grad_norm, (1, np.s_[:], 1e18), []),
    # Only the last piece overflows, where its gradient is carried on to the weights.
    "A large contrastive batch": (contrastive, (1, np.s_[7, 3], 1e36), []),
    "Lazy regularisation": (lazy_regularisation, LARGE_INPUT, [("number % 16", "number % 3"), ("16 * g", "3 * g")]),
    "An attempt of your own": (plain, LARGE_INPUT, []),
    "Two optimizers with one norm": (two_optimizers, LARGE_INPUT, []),
}


def state(module):
    """All that a skipped step must leave alone, by name."""
    further = [getattr(module, name) for name in ("shares", "first_losses") if hasattr(module, name)]
    parameters = {parameter.name: parameter for parameter in [*module.step.get_parameters(), *further]}
    changes = ("loss_scale", "step_counters.")
    return {name: each.asnumpy().tobytes() for name, each in parameters.items() if not name.startswith(changes)}


def assert_close(parameters, expected):
    for its, its_expected in zip(parameters, expected):
        np.testing.assert_allclose(its.asnumpy(), its_expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_step_is_that_of_numpy_and_leaves_nothing_where_it_overflows(heading, way, tmp_path):
    control_step, overflow_at, replace = STEPS[heading]
    module = import_step(tmp_path, way, SECTIONS[heading], replace)
    weights = (
        [*module.d_optimizer.parameters, *module.g_optimizer.parameters] if control_step is a_gan else module.weights
    )
    control, rule = Control(weights), DynamicRule(2.0**16, 2000)
    attempts = 4 if heading == "An attempt of your own" else 1
    batches = make_batches(width=4 if control_step is contrastive else 2)
    if overflow_at:
        which, where, value = overflow_at
        batches[OVERFLOWS][which][where] = value
    else:
        batches[OVERFLOWS].append(1e36)
    for number, batch in enumerate(batches):
        before = state(module)
        inputs = [Tensor(each) if isinstance(each, np.ndarray) else each for each in batch]
        output = module.train_step(*([number] if control_step is lazy_regularisation else []), *inputs)
        overflow = bool(output[-1] if isinstance(output, tuple) else output)
        assert overflow is (number == OVERFLOWS)
        for _ in range(attempts if overflow else 1):
            rule.step(overflow)
        if overflow:
            assert state(module) == before
        else:
            control_step(control, number, *batch)
            assert_close(weights, control.weights)
        assert module.step.get_loss_scale() == rule.scale
    if hasattr(module, "shares"):
        assert_close([module.shares], [control.shares])
        assert abs(control.shares[0] - 1) > 0.01
    counters = {"applied_steps": len(batches) - 1, "skipped_steps": attempts, "consecutive_skipped_steps": 0}
    assert module.step.counters() == counters


def test_a_third_attempt_succeeds(way, tmp_path):
    module = import_step(tmp_path, way, SECTIONS["An attempt of your own"])
    control, ((x, y),) = Control(module.weights), make_batches(1)
    x[0, 3] = 1
    largest = np.abs(gradients(error, control.weights, x, y)[0][:, 3]).max()
    x[0, 3] = np.finfo(np.float32).max / (2.0**14.5 * largest)
    assert not module.train_step(Tensor(x), Tensor(y))[1]
    plain(control, 0, x, y)
    assert_close(module.weights, control.weights)
    assert module.step.get_loss_scale() == 2.0**14
    assert module.step.counters() == {"applied_steps": 1, "skipped_steps": 2, "consecutive_skipped_steps": 0}


def test_a_functional_loop(way, tmp_path):
    """Bit for bit MindSpore's loop, which is the other side of the page's difference."""
    stock, ours = (
        "".join(f"{line[1:]}\n" for line in DIFF.splitlines() if line[:1] in ("", " ", sign)) for sign in "-+"
    )
    stock = import_step(tmp_path, "eager", stock)
    ours = import_step(tmp_path, way, ours, [("def train_step", "@mindspore.jit\ndef train_step")])
    batches, scales = make_batches(8), []
    batches[OVERFLOWS][0][7, 3] = 1e36
    for batch in batches:
        x, y = map(Tensor, batch)
        loss, finite = stock.train_step(x, y)
        before = state(ours)
        its_loss, overflow = ours.train_step(x, y)
        assert bool(overflow) is not bool(finite)
        assert (state(ours) == before) is bool(overflow)
        assert its_loss.asnumpy() == loss.asnumpy()
        for weight, expected in zip(ours.weights, stock.weights):
            assert weight.asnumpy().tobytes() == expected.asnumpy().tobytes()
        scales.append(ours.step.get_loss_scale())
        assert scales[-1] == float(stock.scaler.scale_value)
    assert scales == [2.0**each for each in (16, 16, 17, 16, 16, 16, 17, 17)]
