"""What compiled code refuses in its first call: what networks, transforms, rules and detectors return. And what an
error of MindSpore's means, where it does not say it; a user's own errors stay as they are.

In a process of their own: a compilation that fails leaves MindSpore in a state in which later ones fail, too."""

import itertools

import mindspore
import numpy as np
import pytest
from conftest import MODES, quick_in_graph_mode, slow
from mindspore import Model, Parameter, Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental.optim import AdamW
from support.gan_networks import TupleOf, WithAux, renamed
from support.in_mode import in_mode
from support.networks import Linear, batch, weight
from support.python_process import is_older_mindspore
from support.refused import refused
from support.token_networks import Tokens, sgd, tensors
from support.token_networks import batch as tokens
from support.training import by_sgd

import ms_lossscale as ls


class Returns(Linear):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def construct(self, x, y):
        loss = super().construct(x, y)
        if self.what == "a number":
            return 1.0
        if self.what == "image and loss":
            return x, loss
        if self.what == "image and losses":
            return x, None, loss.reshape(1, 1), loss
        return (loss, 2 * loss) if self.what == "two losses" else {"loss": loss, "image": x}


def scaled(network=None, loss_scale=1024, **keywords):
    return by_sgd(network or Linear(), loss_scale, **keywords)


def pair(*makes):
    return [renamed(f"{i}.", make()) for i, make in enumerate(makes)]


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ("image and loss", ValueError, ["its loss first", "shape (4, 3)", "Return (loss, *aux) with has_aux=True"]),
        ("two losses", TypeError, ["a Tensor of shape (), a Tensor of shape ()", "has_aux=True"]),
        *slow(
            ("image and losses", ValueError, ["network 0", "its loss first", "no Tensor", "shape (1, 1)"]),
            ("a number", TypeError, ["network 0", "one Tensor, the loss", "no Tensor"]),
            ("a dict", TypeError, ["one Tensor, the loss", "no Tensor", "no list or dict"]),
        ),
    ],
)
def test_what_a_network_returns(mode, returned, error, words):
    cell = scaled(Returns(returned), has_aux=returned == "image and loss")
    refused(lambda: cell(*batch()), error, "ScaledTrainOneStepCell", *words)


def test_aux_that_is_missing_or_too_much(mode):
    refused(lambda: scaled(has_aux=True)(*batch()), TypeError, "(loss, *aux)")
    for kind in ("simultaneous", "alternating"):
        networks = pair(Linear, lambda: WithAux(Linear()))
        refused(lambda: by_sgd(networks, 8.0, kind=kind)(*batch()), TypeError, "network 1", "has_aux=True")  # noqa: B023
        networks = pair(Linear, lambda: Returns("image and loss"))
        cell = by_sgd(networks, 8.0, kind=kind, has_aux=[False, True])
        refused(lambda: cell(*batch()), ValueError, "network 1", "its loss first", "(4, 3)")  # noqa: B023


@pytest.mark.parametrize("losses", [1, 3])
def test_a_tuple_of_too_few_or_too_many_losses(mode, losses):
    networks = pair(Linear, Linear)
    # The last one once more, to be too many.
    network = TupleOf(*[*networks, networks[1]][:losses])
    network.in_no_loss = networks[1]
    cell = ls.SimultaneousTrainOneStepCell(network, [nn.SGD(each.trainable_params(), 0.01) for each in networks])
    refused(lambda: cell(*batch()), TypeError, "must return a tuple (loss_0, loss_1)")


class Vector(Tokens):
    def construct(self, x, y, mask):
        return super().construct(x, y, mask)[0], mask


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Tokens(weight_as="mean"), ["network 0", "(loss, weight)"]),
        (Vector(), ["a weight must be a number or a Tensor of shape ()"]),
    ],
)
def test_what_a_weighted_network_returns(mode, network, words):
    cell = ls.ScaledTrainOneStepCell(network, sgd(network), 8.0, weighted=True).set_train()
    refused(lambda: cell(*tensors(tokens(2))), TypeError, *words)


class Transform(nn.Cell):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def construct(self, grads):
        if self.what == "fewer":
            return ()
        if self.what == "number":
            return (1.0,)
        return (grads[0].sum(),) if self.what == "scalar" else None


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("fewer", ValueError, ["0", "1 of (3, 1)"]),
        *(("number", ValueError, ["a number"]), ("scalar", ValueError, ["()"])),
        ("nothing", TypeError, ["something else than a tuple"]),
    ],
)
@quick_in_graph_mode
def test_what_a_transform_returns(mode, what, error, words):
    cell = scaled(gradient_transforms=[Transform(what)])
    refused(lambda: cell(*batch()), error, "Transform returned", *words)


def given(answer, value):
    return ops.depend(answer, value) if isinstance(answer, Tensor) else answer


class Answers(ls.OverflowDetector):
    answer = None

    def construct(self, grads):
        return given(self.answer, grads)


class NextScale(ls.LossScale):
    answer = None

    def next_scale(self, loss_scale, overflow):
        return given(self.answer, loss_scale)


class Condition(ls.SkipCondition):
    answer = None

    def construct(self, loss, norm):
        return given(self.answer, loss)


def answering(cell, answer):
    cell.answer = answer
    return cell


class Two(nn.Cell):
    def construct(self, x):
        return x, x


BOTH, TWO_SCALES = Tensor([True, False]), Tensor(np.float32([16.0, 32.0]))


@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_what_own_cells_answer(mode, steps):
    cycle = {"gradient_accumulation_steps": steps}

    def run(**keywords):
        cell = scaled(**cycle, **keywords).set_train()
        for _ in range(steps):
            cell(*batch())

    rule = "'NextScale', 'next_scale' must return the next step's scale"
    for value, error in ((TWO_SCALES, ValueError), (16.0, TypeError)):
        scale = answering(NextScale(8.0), value)
        refused(lambda: run(loss_scale=scale), error, rule)  # noqa: B023
        refused(lambda: scale.adjust(Tensor(True)), error, rule)  # noqa: B023
    for answer, error in ((BOTH, ValueError), (False, TypeError)):
        detector = answering(Answers(), answer)
        refused(lambda: run(overflow_detector=detector), error, "'Answers', 'construct' must return")  # noqa: B023
        condition = answering(Condition(), answer)
        refused(lambda: run(skip_conditions=[condition]), error, "'Condition'")  # noqa: B023
    condition = answering(Condition(), Tensor(1.0))
    refused(lambda: run(skip_conditions=[condition]), TypeError, "'Condition'", "a bool Tensor")
    refused(lambda: ls.InputGradient(Two())(Tensor([1.0, 2.0])), TypeError, "'InputGradient'", "one Tensor")


@pytest.mark.parametrize("value", [3.0, Tensor([1, 2]), Tensor([True]), Tensor([1j])], ids=str)
def test_what_an_input_gradient_is_called_with(value):
    refused(lambda: ls.InputGradient(nn.Embedding(4, 1))(value), TypeError, "'x' must be a Tensor of a float")


@pytest.mark.parametrize("twice, words", [(False, ["((3, 1),)"]), *slow((True, []))])
def test_other_gradients_of_a_manual_step(mode, twice, words):
    network = Linear()
    step = ls.ManualStep(network, nn.SGD(network.trainable_params(), 0.01), 8.0)

    @mindspore.jit
    def end(*grads):
        return step.end(grads, grads) if twice else step.end(grads[:-1])

    each = "a tuple of gradients for each of the 1 optimizers"
    step.begin(*batch())
    refused(lambda: end(Tensor(np.zeros((3, 1), np.float32))), ValueError, each, *words)
    step.end((Tensor(np.zeros((3, 1), np.float32)),))
    assert step.counters()["applied_steps"] == 1


def test_model_with_a_loss_function():
    dataset = NumpySlicesDataset(tuple(each.asnumpy() for each in batch())).batch(2)
    words = ("The parameters number of the function is 2, but the number of provided arguments is 1",)
    with in_mode(MODES["graph"]):
        model = Model(scaled(), nn.MSELoss())
        refused(lambda: model.train(1, dataset, dataset_sink_mode=False), TypeError, *words)


# A network's own errors.


class WithJit(Linear):  # A network of which MindSpore compiles one method by itself, in PyNative mode.
    @mindspore.jit
    def doubled(self, x):
        return x * 2

    def construct(self, x, y):
        if len(x.shape) != 2:
            raise RuntimeError("x must have two dimensions")
        return super().construct(self.doubled(x), y)


def test_a_networks_own_error_stays_as_it_is(mode):
    cell = scaled(WithJit(), ls.DynamicLossScale()).set_train()
    good = batch(0)
    cell(*good)
    # Graph mode quotes it.
    with pytest.raises(RuntimeError, match=r"^'?x must have two dimensions") as raised:
        cell(Tensor(np.ones(3, np.float32)), good[1])
    assert raised.type is RuntimeError
    assert raised.value.__cause__ is None


# The gradient of a critic that another loss calls, too.


class Matrix(nn.Cell):
    def __init__(self, name):
        super().__init__()
        self.weight = weight(2, 2, name=name)

    def construct(self, x):
        return ops.tanh(ops.matmul(x, self.weight))


class Score(nn.Cell):  # The generator's loss.
    def __init__(self, generator, critic):
        super().__init__(auto_prefix=False)
        self.generator, self.critic = generator, critic

    def construct(self, x):
        return -self.critic(self.generator(x)).mean()


class Penalized(nn.Cell):  # The critic's loss.
    def __init__(self, critic):
        super().__init__(auto_prefix=False)
        self.critic, self.gradient = critic, ops.GradOperation()(critic)

    def construct(self, x):
        return self.critic(x).mean() + ops.square(self.gradient(x)).sum()


class OfAMethod(Penalized):
    def __init__(self, critic):
        super().__init__(critic)
        self.gradient = ops.GradOperation()(self.score)

    def score(self, x):
        return self.critic(x)


@pytest.mark.parametrize("order", slow(1, -1))
def test_the_gradient_of_a_critic_that_another_loss_calls(order):
    def alternating(penalized):
        networks = [Matrix("generator"), Matrix("critic")]
        losses = [Score(*networks), penalized(networks[1])][::order]
        optimizers = [nn.SGD(network.trainable_params(), 0.01) for network in networks[::order]]
        return ls.AlternatingTrainOneStepCell(losses, optimizers, 16.0)

    x = Tensor(np.ones((3, 2), np.float32))
    with in_mode(MODES["graph"]):
        cure = "Take the gradient of a method of the loss cell instead"
        refused(lambda: alternating(Penalized)(x), RuntimeError, cure)
        assert not alternating(OfAMethod)(x)[1].asnumpy().any()


def test_an_optimizer_that_mindspore_compiled_by_itself_can_not_be_compiled_again():
    network = Linear()
    cell = ls.ScaledTrainOneStepCell(network, AdamW(network.trainable_params(), 0.01), ls.DynamicLossScale())
    with in_mode(MODES["pynative"]):
        cell(*batch(0))
    with in_mode(MODES["graph"]):
        refused(lambda: cell(*batch(1)), RuntimeError, "was compiled by itself, in PYNATIVE_MODE")


class Holder:
    """An object that is no Cell."""

    def __init__(self):
        self.count = Parameter(Tensor(0.0), name="count", requires_grad=False)


def counted_in(count, x):
    ops.assign(count, count + 1.0)
    return x


def counted(count):
    ops.assign(count, count + 1.0)
    return count


class CountsInAHolder(Linear):
    def __init__(self, passes_it, gets_it_back):
        super().__init__()
        self.holder = Holder()
        self.count = None if passes_it else self.holder.count
        self.gets_it_back = gets_it_back

    def construct(self, x, y):
        if self.gets_it_back:
            return super().construct(x * counted(self.holder.count if self.count is None else self.count), y)
        return super().construct(counted_in(self.holder.count if self.count is None else self.count, x), y)


def test_state_of_an_object_that_a_function_gets_within_the_loop_of_retries():
    """MindSpore compiles no loop with a function that it also runs before, if that gets such a Parameter."""
    with in_mode(MODES["graph"]):
        # MindSpore 2.7 loses what such a function writes in any call of a network.
        ways = (False,) if is_older_mindspore() else (False, True)
        for passes_it, gets_it_back in itertools.product(ways, (False, True)):
            network = CountsInAHolder(passes_it, gets_it_back)
            cell = scaled(network, ls.DynamicLossScale(2.0**4), max_retries=1)
            if passes_it:
                words = ("'max_retries'", "a Parameter of an object that is no Cell", "self.state = holder.state")
                refused(lambda: cell(*batch()), RuntimeError, *words)  # noqa: B023
            else:
                cell(*batch())
                assert float(network.holder.count.asnumpy()) == 1.0
