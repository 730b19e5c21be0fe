"""The gradient of a network by its input, under a scale of its own or a training cell's, and its own gradients."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.gan_networks import TupleOf

from ms_lossscale import AlternatingTrainOneStepCell as Alternating
from ms_lossscale import DynamicLossScale, InputGradient, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

SAMPLES, FEATURES, HIDDEN = 8, 6, 5
# So much the results may differ from float64's, of the largest element: about eight roundings one after another.
FLOAT16, FLOAT32 = 2.0**-8, 2.0**-20
# Of weights that small, the gradient by the input is about 1e-8: zero in float16, whose smallest number is 6e-8.
SMALL = 1e-4
PENALTY, NO_ROOT_OF_ZERO = 10.0, 1e-20


def values(seed, shape, size=1.0):
    """Numbers that float16 holds exactly."""
    return (size * np.random.default_rng(seed).normal(size=shape)).astype(np.float16).astype(np.float32)


REAL, FAKE = (Tensor(values(seed, (SAMPLES, FEATURES))) for seed in (10, 11))


class Critic(nn.Cell):
    """Samples to scores, in float16 if that is asked for: `tanh(x @ hidden) @ score`."""

    def __init__(self, size=0.25, dtype=mstype.float32):
        super().__init__()
        self.hidden = Parameter(Tensor(values(0, (FEATURES, HIDDEN), size)), name="critic.hidden")
        self.score = Parameter(Tensor(values(1, (HIDDEN, 1), size)), name="critic.score")
        self._dtype = dtype

    def construct(self, x):
        # Of ops.matmul PyNative mode loses the second derivatives.
        hidden = ops.tanh(ops.matmul(x.astype(self._dtype), self.hidden.astype(self._dtype)))
        return ops.matmul(hidden, self.score.astype(self._dtype))


class Penalty(nn.Cell):
    """How far the norms of a gradient are from 1."""

    def __init__(self, slope, factor=PENALTY):
        super().__init__(auto_prefix=False)
        self.slope, self.factor = slope, factor

    def construct(self, x):
        norm = ops.sqrt(ops.square(self.slope(x)).sum(1) + NO_ROOT_OF_ZERO)
        return self.factor * ops.square(norm - 1).mean()


class CriticLoss(nn.Cell):
    """The loss of a critic (Wasserstein, with gradient penalty) of real and of generated samples."""

    def __init__(self, critic, loss_scale=None, generator=None):
        super().__init__(auto_prefix=False)
        self.critic = critic
        self.generator = generator or nn.Identity()
        self.penalty = Penalty(InputGradient(critic, loss_scale))

    def construct(self, real, fake):
        fake = ops.stop_gradient(self.generator(fake))
        scores = self.critic(fake).mean() - self.critic(real).mean()
        return scores.astype(mstype.float32) + self.penalty(0.5 * (real + fake))


class Generator(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.eye(FEATURES, dtype=np.float32)), name="generator.weight")

    def construct(self, x):
        return ops.matmul(x, self.weight)


class GeneratorLoss(nn.Cell):
    def __init__(self, generator, critic):
        super().__init__(auto_prefix=False)
        self.generator, self.critic = generator, critic

    def construct(self, real, noise):
        return -self.critic(self.generator(noise)).mean()


# The same in float64.


def float64(*tensors):
    return [tensor.asnumpy().astype(np.float64) for tensor in tensors]


def gradient_by_input(critic, x):
    hidden, score, x = float64(critic.hidden, critic.score, x)
    return ((1 - np.tanh(x @ hidden) ** 2) * score[:, 0]) @ hidden.T


def penalty_and_gradients(critic, x):
    """The penalty, and its gradients by the critic's weights."""
    slope = gradient_by_input(critic, x)
    hidden, score, x = float64(critic.hidden, critic.score, x)
    outputs = np.tanh(x @ hidden)
    steep = 1 - outputs**2
    norm = np.sqrt((slope**2).sum(1, keepdims=True) + NO_ROOT_OF_ZERO)
    by_slope = PENALTY * 2 * (norm - 1) / norm * slope / len(x)
    by_product = by_slope @ hidden
    by_hidden = by_slope.T @ (steep * score[:, 0]) - 2 * x.T @ (by_product * score[:, 0] * outputs * steep)
    return PENALTY * ((norm - 1) ** 2).mean(), [by_hidden, (by_product * steep).sum(0)[:, None]]


def critic_gradients(critic, real, fake):
    """Those of a CriticLoss."""
    _, grads = penalty_and_gradients(critic, Tensor(0.5 * (real.asnumpy() + fake.asnumpy())))
    for samples, sign in ((fake, 1), (real, -1)):
        hidden, score, x = float64(critic.hidden, critic.score, samples)
        outputs = np.tanh(x @ hidden)
        grads[0] = grads[0] + sign * x.T @ ((1 - outputs**2) * score[:, 0]) / len(x)
        grads[1] = grads[1] + sign * outputs.mean(0)[:, None]
    return grads


def assert_close(actual, expected, tolerance):
    for its, wanted in zip(actual, expected):
        assert np.abs(its - wanted).max() <= tolerance * np.abs(wanted).max()


def sgd(network):
    """One whose step is the gradient."""
    return nn.SGD(network.trainable_params(), 1.0)


def step(cell, critic, *inputs):
    """What a call returns, and what it moved the critic's weights by. They are put back."""
    weights = (critic.hidden, critic.score)
    before = [ops.deepcopy(weight) for weight in weights]
    output = cell(*inputs)
    moved = [was - now for was, now in zip(float64(*before), float64(*weights))]
    for weight, value in zip(weights, before):
        ops.assign(weight, value)
    return output, moved


SCALES = pytest.mark.parametrize("make", [lambda: 2.0**14, lambda: DynamicLossScale(2.0**14)], ids=["own", "shared"])


@SCALES
@quick_in_pynative_mode
def test_of_small_weights_the_gradient_is_float16_exact(mode, make):
    critic = Critic(SMALL, mstype.float16)
    slope = InputGradient(critic, make())(REAL)
    assert (slope.dtype, slope.shape) == (mstype.float32, REAL.shape)
    assert_close([slope.asnumpy()], [gradient_by_input(critic, REAL)], FLOAT16)


@quick_in_graph_mode
@SCALES
def test_of_small_weights_a_penalty_trains_as_in_float64(mode, make):
    critic, loss_scale = Critic(SMALL, mstype.float16), make()
    expected, gradients = penalty_and_gradients(critic, REAL)
    cell = ScaledTrainOneStepCell(Penalty(InputGradient(critic, loss_scale)), sgd(critic), loss_scale)
    (loss, overflow, _), moved = step(cell, critic, REAL)
    assert not overflow
    np.testing.assert_allclose(float(loss), expected, rtol=1e-6)
    assert_close(moved, gradients, FLOAT16)


CELLS = {
    "scaled": lambda losses, optimizers, rule: ScaledTrainOneStepCell(losses[0], optimizers[0], rule),
    "list": SimultaneousTrainOneStepCell,
    "tuple": lambda losses, *rest: SimultaneousTrainOneStepCell(TupleOf(*losses), *rest),
    "alternating": lambda losses, optimizers, rule: Alternating(losses, optimizers, [rule, 16.0]),
    "generator first": lambda losses, its, rule: Alternating(losses[::-1], its[::-1], [16.0, rule]),
}


@quick_in_graph_mode
@pytest.mark.parametrize(
    "kind, loss_scale",
    [
        ("tuple", "shared"),
        ("scaled", None),
        *slow(("list", "shared"), ("alternating", "shared"), ("generator first", "shared"), ("alternating", 64.0)),
    ],
)
def test_in_each_cell_beside_another_loss_of_the_critic(mode, kind, loss_scale):
    generator, critic, rule = Generator(), Critic(), DynamicLossScale(2.0**10, scale_window=1)
    loss = CriticLoss(critic, rule if loss_scale == "shared" else loss_scale, generator)
    optimizers = [sgd(critic), nn.SGD(generator.trainable_params(), 0.0)]
    cell = CELLS[kind]([loss, GeneratorLoss(generator, critic)], optimizers, rule).set_train()
    # The update rule moves, and a second step, at other weights, is right as well.
    for seed in range(2):
        expected = critic_gradients(critic, REAL, FAKE)
        assert_close(step(cell, critic, REAL, FAKE)[1], expected, FLOAT32)
        assert rule.get_loss_scale() == 2.0 ** (11 + seed)
        ops.assign(critic.hidden, Tensor(values(2, (FEATURES, HIDDEN), 0.25)))
    # The scale is the training cell's, and nothing that a forward writes.
    assert cell.forward_state_names() == []
    assert [each.name for each in loss.get_parameters()] == ["critic.hidden", "critic.score", "generator.weight"]
    names = [parameter.name for parameter in cell.get_parameters()]
    assert len(set(names)) == len(names)
    assert sum(name.endswith("clean_steps") for name in names) == 1


@quick_in_pynative_mode
def test_the_scale_is_that_of_the_step_and_an_overflow_skips_it(mode):
    """A float16 output is infinite at 65536, to which the update rule moves in the first step, after it was used."""
    critic, rule = Critic(dtype=mstype.float16), DynamicLossScale(2.0**15, scale_window=1)
    # So small a part of the loss that its gradients bear 65536.
    factor = 2.0**-6 / PENALTY
    cell = ScaledTrainOneStepCell(Penalty(InputGradient(critic, rule), 2.0**-6), sgd(critic), rule)
    _, gradients = penalty_and_gradients(critic, REAL)
    for call, (scale, overflows) in enumerate([(2.0**15, False), (2.0**16, True), (2.0**15, False)]):
        (loss, overflow, used), moved = step(cell, critic, REAL)
        assert (float(used), bool(overflow)) == (scale, overflows), call
        assert np.isfinite(float(loss)) != overflows
        assert_close(moved, [(0 if overflows else factor) * wanted for wanted in gradients], FLOAT16)
    assert cell.counters() == {"applied_steps": 2, "skipped_steps": 1, "consecutive_skipped_steps": 0}


@quick_in_pynative_mode
def test_weights_that_are_given_other_memory_are_seen(mode):
    """Compiled code in PyNative mode goes on with what it knew."""
    critic = Critic()
    slope = InputGradient(critic, DynamicLossScale(2.0**4))
    for seed in range(3):
        critic.hidden.set_data(Tensor(values(seed, (FEATURES, HIDDEN), 0.25)))
        assert_close([slope(REAL).asnumpy()], [gradient_by_input(critic, REAL)], FLOAT32)
        loaded = {"critic.score": Parameter(Tensor(values(seed, (HIDDEN, 1), 0.25)))}
        mindspore.load_param_into_net(critic, loaded)
        assert_close([slope(REAL).asnumpy()], [gradient_by_input(critic, REAL)], FLOAT32)
