"""The steps of docs/own_steps.md: each against a step in NumPy, in float64, and with an overflow in the worst place."""

import re
import textwrap

import mindspore
import numpy as np
import pytest
from conftest import nightly, slow
from mindspore import Tensor
from support.differences import side_of
from support.in_mode import in_mode
from support.python_process import ROOT, import_code
from support.reference import DynamicRule

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell

PAGE = (ROOT / "docs" / "own_steps.md").read_text()
SECTIONS = dict(re.findall(r"^```python\n# (.+?)\n(.*?)^```", PAGE, re.S | re.M))
SET_UP = SECTIONS.pop("Set-up")
OF_GANS = SECTIONS.pop("Networks of a GAN")
LOOP, ACCUMULATION = re.findall(r"^```diff\n(.*?)^```", PAGE, re.S | re.M)
RETRIES, RETRIES_OF_A_CYCLE = re.findall(r"^```py\n(for attempt.*?)^```", PAGE, re.S | re.M)

# Each with the mode, and whether what the page compiles is compiled.
GRAPH, PYNATIVE = mindspore.GRAPH_MODE, mindspore.PYNATIVE_MODE
WAYS = {"eager": (PYNATIVE, False), "graph": (GRAPH, True), "pynative": (PYNATIVE, True)}
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


def sides_of(difference):
    return [side_of(difference, sign) for sign in "-+"]


def with_train(code, loop=None):
    """Returns code in which the loop at its end, or another one of the page, is a function `train`."""
    step, its_loop = re.split("\n(?=for )", code)
    return f"{step}\n\ndef train(dataset, losses):\n{textwrap.indent(loop or its_loop, '    ')}"


def make_batches(count=7):
    rng = np.random.default_rng(0)
    batches = [[rng.normal(size=(8, size)).astype(np.float32) for size in (4, 2)] for _ in range(count)]
    for x, _ in batches:
        x[:, 3] = 0
    return batches


def network(weights, x):
    """The page's network. With complex weights it is differentiated by a complex step, which rounds like a forward."""
    first, first_bias, second, second_bias = weights
    return np.tanh(x @ first.T + first_bias) @ second.T + second_bias


def error(weights, x, y):
    return ((network(weights, x) - y) ** 2).mean()


def gradients(loss_of, arrays, *inputs):  # Differentiates by arrays, in float64, without a formula for the gradient.
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

    def update(self, grads, numbers=None):
        """Updates the weights with these numbers, or all."""
        for i, grad in zip(numbers or range(len(self.weights)), grads):
            self.velocities[i] = 0.9 * self.velocities[i] + grad
            self.weights[i] = self.weights[i] - 0.05 * self.velocities[i]


def losses_of_a_gan(d, g):
    def judged(weights, images):
        return images @ weights[0].T + weights[1]

    def d_loss(weights, real, noise):
        return ((judged(weights, real) - 1) ** 2).mean() + (judged(weights, judged(g, noise)) ** 2).mean()

    def g_loss(weights, noise):
        return ((judged(d, judged(weights, noise)) - 1) ** 2).mean()

    return d_loss, g_loss


def a_gan(control, real, noise):
    d, g = control.weights[:2], control.weights[2:]
    d_loss, g_loss = losses_of_a_gan(d, g)
    control.update(gradients(d_loss, d, real, noise) + gradients(g_loss, g, noise))


def a_gan_in_turns(control, real, noise):
    d, g = control.weights[:2], control.weights[2:]
    d_loss, _ = losses_of_a_gan(d, g)
    control.update(gradients(d_loss, d, real, noise), range(2))
    _, g_loss = losses_of_a_gan(control.weights[:2], g)
    control.update(gradients(g_loss, g, noise), range(2, 4))


def sam(control, x, y):
    grads = gradients(error, control.weights, x, y)
    uphill = [weight + 0.05 / norm(grads) * grad for weight, grad in zip(control.weights, grads)]
    control.update(gradients(error, uphill, x, y))


def per_sample_clipping(control, x, y):
    # With noise that is 1 everywhere.
    total, norms = [np.full_like(weight, 1.5 * 2.0) for weight in control.weights], []
    for i in range(len(x)):
        grads = gradients(error, control.weights, x[i : i + 1], y[i : i + 1])
        norms.append(norm(grads))
        total = [each + min(1, 2.0 / norms[-1]) * grad for each, grad in zip(total, grads)]
    assert max(norms) > 2.0
    control.update([each / len(x) for each in total])


NOISE = [("2.0, 0.0", "2.0, 1.5"), ("ops.standard_normal(mean.shape)", "ops.ones(mean.shape)")]
# For each section, the step in NumPy, the overflow, and what to replace in the code.
STEPS = {
    "A GAN": (a_gan, (1, np.s_[:], 1e30), []),
    "A GAN in turns": (a_gan_in_turns, (1, np.s_[:], 1e30), []),
    # The first backward is clean, its step uphill leads to where the second one overflows.
    "SAM": (sam, None, []),
    # Clipped to nothing, the gradient of one sample would not show in the mean.
    "Per-sample clipping": (per_sample_clipping, (1, np.s_[7], 1e36), NOISE),
}


def steps_of(module):
    return [step for step in vars(module).values() if isinstance(step, ManualStep)]


def state(module):  # All that a skipped step must leave alone, by name.
    parameters = {each.name: each for step in steps_of(module) for each in step.get_parameters()}
    changes = re.compile(r"(\w+\.)?(loss_scale|step_counters)\.")
    return {name: each.asnumpy().tobytes() for name, each in parameters.items() if not changes.match(name)}


def assert_close(parameters, expected):
    for its, its_expected in zip(parameters, expected):
        np.testing.assert_allclose(its.asnumpy(), its_expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_step_is_that_of_numpy_and_leaves_nothing_where_it_overflows(heading, way, tmp_path):
    control_step, overflow_at, replace = STEPS[heading]
    is_gan = heading.startswith("A GAN")
    module = import_step(tmp_path, way, (OF_GANS if is_gan else "") + SECTIONS[heading], replace)
    weights = [*module.d_optimizer.parameters, *module.g_optimizer.parameters] if is_gan else module.weights
    control, rule = Control(weights), DynamicRule(2.0**16, 2000)
    batches = make_batches()
    if overflow_at:
        which, where, value = overflow_at
        batches[OVERFLOWS][which][where] = value
    else:
        batches[OVERFLOWS].append(1e36)
    for number, batch in enumerate(batches):
        before = state(module)
        inputs = [Tensor(each) if isinstance(each, np.ndarray) else each for each in batch]
        steps = steps_of(module)
        overflows = list(map(bool, module.train_step(*inputs)[-len(steps) :]))
        overflow = number == OVERFLOWS
        assert overflows == [overflow] * len(steps)
        rule.step(overflow)
        if overflow:
            assert state(module) == before
        else:
            control_step(control, *batch)
            assert_close(weights, control.weights)
        assert {step.get_loss_scale() for step in steps} == {rule.scale}
    counters = {"applied_steps": len(batches) - 1, "skipped_steps": 1, "consecutive_skipped_steps": 0}
    assert [step.counters() for step in steps] == [counters] * len(steps)


def test_a_functional_loop(way, tmp_path):
    """Bit for bit MindSpore's loop, which is the other side of the page's difference."""
    stock, ours = map(with_train, sides_of(LOOP))
    stock = import_step(tmp_path, "eager", stock)
    ours = import_step(tmp_path, way, ours, [("def train_step", "@mindspore.jit\ndef train_step")])
    batches, scales = make_batches(8), []
    batches[OVERFLOWS][0][7, 3] = 1e36
    for number, batch in enumerate(batches):
        stock_losses, losses = [], []
        stock.train([map(Tensor, batch)], stock_losses)
        before = state(ours)
        ours.train([map(Tensor, batch)], losses)
        is_skipped = number == OVERFLOWS
        assert (state(ours) == before) is is_skipped
        assert len(losses) == (0 if is_skipped else 1)
        assert list(map(float, losses)) == list(map(float, stock_losses))
        for weight, expected in zip(ours.weights, stock.weights):
            assert weight.asnumpy().tobytes() == expected.asnumpy().tobytes()
        scales.append(ours.step.get_loss_scale())
        assert scales[-1] == float(stock.scaler.scale_value)
    assert scales == [2.0**each for each in (16, 16, 17, 16, 16, 16, 17, 17)]


@pytest.mark.slow
def test_retries_are_those_of_a_training_cell(way, tmp_path):
    """But that each attempt counts as a step."""
    code = with_train(sides_of(LOOP)[1], RETRIES + "return attempt, overflow\n")
    code = code.replace("def train(dataset, losses)", "def train(x, y)")
    code = code.replace("(2**16, scale_window=3)", "(2.0**126, scale_window=3, max_loss_scale=2.0**126)")
    ours = import_step(tmp_path, way, code, [("def train_step", "@mindspore.jit\ndef train_step")])
    (tmp_path / "cell").mkdir()
    other = import_step(tmp_path / "cell", way, "")
    loss_scale = DynamicLossScale(2.0**126, scale_window=3, max_loss_scale=2.0**126)
    cell = ScaledTrainOneStepCell(other.forward, other.optimizer, loss_scale, max_retries=2)
    attempts, skipped = 0, []
    for number, (x, y) in enumerate(make_batches(8)):
        # The first batch overflows in each attempt.
        inputs = Tensor(x), Tensor(y * (2.0**7 if number else 2.0**10))
        attempt, overflow = ours.train(*inputs)
        attempts += attempt + 1
        skipped.append(bool(overflow))
        assert bool(cell(*inputs)[1]) is skipped[-1]
        assert ours.step.get_loss_scale() == cell.get_loss_scale()
        for weight, expected in zip(ours.weights, other.weights):
            assert weight.asnumpy().tobytes() == expected.asnumpy().tobytes()
    assert skipped == [True] + [False] * 7
    retries = cell.counters()["retries"]
    assert retries > 2 and attempts == 8 + retries
    counters = {"applied_steps": 7, "skipped_steps": 1 + retries, "consecutive_skipped_steps": 0}
    assert ours.step.counters() == counters


@pytest.mark.slow
def test_a_loop_over_small_batches(tmp_path):
    stock, ours = map(with_train, sides_of(LOOP), sides_of(ACCUMULATION))
    with in_mode(mindspore.PYNATIVE_MODE):
        stock = import_step(tmp_path, "eager", stock)
        four_calls = ("scale_window=3)", "scale_window=3), gradient_accumulation_steps=4")
        ours = import_step(tmp_path, "eager", ours, [four_calls])
        for module in (stock, ours):
            module.train([tuple(map(Tensor, batch)) for batch in make_batches(4)], [])
    assert ours.step.counters()["applied_steps"] == 1
    assert_close(ours.weights, [weight.asnumpy() for weight in stock.weights])


@pytest.mark.slow
def test_a_cycle_is_tried_again_as_a_whole(way, tmp_path):
    """Its weights are those that a scale which never overflows makes: powers of two scale exactly."""
    code = with_train(sides_of(LOOP)[1], RETRIES_OF_A_CYCLE + "return attempt, overflow\n")
    code = code.replace("def train(dataset, losses)", "def train(batches_of_a_cycle)")
    settings = "(2.0**125, scale_window=3, max_loss_scale=2.0**125), gradient_accumulation_steps=2"
    code = code.replace("(2**16, scale_window=3)", settings)
    ours = import_step(tmp_path, way, code, [("def train_step", "@mindspore.jit\ndef train_step")])
    (tmp_path / "cell").mkdir()
    other = import_step(tmp_path / "cell", way, "")
    cell = ScaledTrainOneStepCell(other.forward, other.optimizer, 2.0**10, gradient_accumulation_steps=2)
    attempts = []
    batches = list(make_batches(8))
    for i in range(0, len(batches), 2):
        cycle = [(Tensor(x), Tensor(y * 2.0**5)) for x, y in batches[i : i + 2]]
        attempt, overflow = ours.train(cycle)
        attempts.append(attempt)
        assert not overflow
        for data in cycle:
            cell(*data)
        for weight, expected in zip(ours.weights, other.weights):
            assert weight.asnumpy().tobytes() == expected.asnumpy().tobytes()
    assert max(attempts) > 0
    assert ours.step.counters() == {
        "applied_steps": len(attempts),
        "skipped_steps": sum(attempts),
        "consecutive_skipped_steps": 0,
    }
