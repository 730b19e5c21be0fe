"""What a ManualStep is not given as it should be: it says so, and nothing changes."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, nn
from support.manual_training import FEATURES, HOWS, adam, batch, manual, regression, train_step_of
from support.networks import Linear
from support.training import changed, state

from ms_lossscale import DynamicLossScale, ManualStep


def dynamic():
    return DynamicLossScale(2.0**10, scale_window=3)


def zeros(weights):
    return tuple(Tensor(np.zeros(weight.shape, np.float32)) for weight in weights)


def check_refused(step, call, error, *words):
    """Asserts that a call is refused in words that have all these in them, and changes nothing."""
    before = state(step)
    with pytest.raises(error) as raised:
        call()
    for word in ("ManualStep", *words):
        assert word in str(raised.value)
    assert not changed(before, state(step))


@pytest.fixture
def trained(mode):
    """A ManualStep that has made a step, and its train step."""
    step, _, train_step = manual(dynamic(), ema_decay=0.9)
    train_step(*batch(0))
    return step, train_step


@quick_in_pynative_mode
class TestOneOptimizer:
    def test_an_end_without_a_beginning(self, trained):
        step, train_step = trained
        words = ("'end()' ends the step that 'begin()' began, but none has begun", "Call begin(*inputs) in each step")
        check_refused(step, lambda: step.end(zeros(step.parameters)), RuntimeError, *words)
        assert not bool(train_step(*batch(1))[1])

    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda grads: (grads[:-1],), ValueError, ["each of the 6 weights", "got 5", "'parameters'"]),
            (lambda grads: (grads, grads), ValueError, ["each optimizer, one tuple", "got 2 arguments", "end(grads)"]),
            (lambda grads: grads, ValueError, ["each optimizer, one tuple", "got 6 arguments", "end(grads)"]),
            (lambda grads: grads[:1], TypeError, ["a tuple of Tensors, one for each weight", "'Tensor'"]),
            (lambda grads: ((None, *grads[1:]),), TypeError, ["a tuple of Tensors, one for each weight", "None"]),
            (lambda grads: ({"a": grads[0]},), TypeError, ["a tuple of Tensors, one for each weight", "'dict'"]),
            (
                lambda grads: ((grads[1], grads[0], *grads[2:]),),
                ValueError,
                ["gradient of 'network_0.0.weight' must have the shape (6, 4), but got (6,)", "in the order of"],
            ),
        ],
    )
    def test_other_gradients(self, trained, make, error, words):
        step, train_step = trained
        step.begin(*batch(1))
        check_refused(step, lambda: step.end(*make(zeros(step.parameters))), error, *words)
        # The step has not ended, and may still end.
        step.end(list(zeros(step.parameters)))
        assert step.counters()["applied_steps"] == 2
        assert not bool(train_step(*batch(1))[1])

    def test_within_ema_weights(self, trained):
        step, train_step = trained
        with step.ema_weights():
            check_refused(step, lambda: step.begin(*batch(1)), RuntimeError, "a step", "ema_weights")
        step.begin(*batch(1))
        with step.ema_weights():
            check_refused(step, lambda: step.end(zeros(step.parameters)), RuntimeError, "a step", "ema_weights")
        step.end(zeros(step.parameters))
        assert not bool(train_step(*batch(1))[1])

    def test_it_is_not_called_itself(self, trained):
        step, _ = trained
        words = ("is not called itself", "begin(*inputs) before", "end(grads) after")
        check_refused(step, lambda: step(*batch(1)), RuntimeError, *words)

    def test_it_is_not_cast(self, trained):
        step, _ = trained
        check_refused(step, lambda: step.to_float(mindspore.float16), ValueError, "must stay in float32")


@quick_in_pynative_mode
class TestTwoOptimizers:
    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda a, b: (a,), ValueError, ["each of the 2 optimizers", "got 1 arguments", "end(grads_0, grads_1)"]),
            (lambda a, b: ((a, b),), ValueError, ["each of the 2 optimizers", "got 1 arguments"]),
            (lambda a, b: (a, b[:-1]), ValueError, ["6 weights of optimizer 1", "got 5"]),
            (lambda a, b: (a, 3), TypeError, ["the gradients of optimizer 1 must be a tuple of Tensors", "3"]),
            (lambda a, b: (a, b[::-1]), ValueError, ["'network_1.0.weight' must have the shape (6, 4)", "(1,)"]),
        ],
    )
    def test_other_gradients(self, mode, make, error, words):
        step, _, train_step = manual(dynamic(), count=2)
        train_step(*batch(0))
        step.begin(*batch(1))
        check_refused(step, lambda: step.end(*make(*map(zeros, step.parameters))), error, *words)
        step.end(*map(zeros, step.parameters))
        assert not bool(train_step(*batch(1))[1])


# Graph mode reads no lambda out of a list.
def all_but_one(grads):
    return (grads[:-1],)


def twice(grads):
    return grads, grads


def only_one(grads):
    return (grads[0],)


def reversed_order(grads):
    return (grads[::-1],)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (all_but_one, ValueError, ["each of the 6 weights", "got 5"]),
        *slow(
            (twice, ValueError, ["each optimizer, one tuple", "got 2 arguments"]),
            (only_one, TypeError, ["a tuple of Tensors, one for each weight"]),
            (reversed_order, ValueError, ["'network_0.0.weight' must have the shape (6, 4)", "(1,)"]),
        ),
    ],
)
def test_other_gradients_in_compiled_code(mode, make, error, words):
    step, _, train_step = manual(dynamic())
    train_step(*batch(0))

    @mindspore.jit
    def end(*grads):
        return step.end(*make(grads))

    step.begin(*batch(1))
    check_refused(step, lambda: end(*zeros(step.parameters)), error, *words)
    step.end(zeros(step.parameters))
    assert not bool(train_step(*batch(1))[1])


@quick_in_pynative_mode
def test_a_flush_within_ema_weights(mode):
    step, *_ = manual(dynamic(), ema_decay=0.9, gradient_accumulation_steps=2)
    with step.ema_weights():
        check_refused(step, step.flush, RuntimeError, "'flush()'", "ema_weights")


def stranger():
    network = Linear()
    network.weight.name = "stranger.weight"
    return network


class TestArguments:
    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda net: ([], adam(net)), ValueError, ["'networks' must not be empty"]),
            (lambda net: (None, adam(net)), TypeError, ["'networks[0]'", "a Cell or a function", "None"]),
            (lambda net: (net, []), ValueError, ["'optimizers' must not be empty"]),
            (lambda net: (net, "adam"), TypeError, ["'optimizers[0]' must be a Cell", "'adam'"]),
            (lambda net: (net, adam(stranger())), ValueError, ["Adam", "stranger.weight"]),
            (lambda net: (net, [adam(net), adam(net)]), ValueError, ["no two optimizers may own the same"]),
            (lambda net: (net, adam(net), [1.0, 2.0]), ValueError, ["'loss_scale'", "2"]),
            (lambda net: (adam(net), net), TypeError, ["'networks'", "'optimizers'"]),
        ],
    )
    def test_networks_and_optimizers(self, make, error, words):
        with pytest.raises(error) as raised:
            ManualStep(*make(regression()))
        for word in ("ManualStep", *words):
            assert word in str(raised.value)

    @pytest.mark.parametrize("keyword", ["max_retries", "has_aux", "network_inputs", "every"])
    def test_keywords_of_the_training_cells_only(self, keyword):
        network = regression()
        with pytest.raises(TypeError, match=keyword):
            ManualStep(network, adam(network), **{keyword: 1})


class Interrupted(Exception):
    """Raised in the middle of a step."""


def given_up(step, networks, data, how):
    """Begins a step, runs its forward and gives it up; returns what the forward has written."""

    def forward(x, y):
        x, y = step.begin(x, y)
        return networks[0](x, y)

    (mindspore.jit(forward) if how == "in_jit" else forward)(*data)


@pytest.mark.parametrize("steps", [1, *slow(2)])
@pytest.mark.parametrize("how", HOWS)
def test_a_step_that_never_ends_is_undone_when_the_next_begins(mode, how, steps):
    """Of an accumulation cycle, the calls before stay."""
    step, networks, train_step = manual(dynamic(), how, gradient_accumulation_steps=steps)
    expected, _, its_train_step = manual(dynamic(), how, gradient_accumulation_steps=steps)
    for seed in range(4):
        before = state(networks[0])
        given_up(step, networks, batch(10 + seed, overflows=seed == 2), how)
        assert changed(before, state(networks[0])) == {"network_0.1.moving_mean", "network_0.1.moving_variance"}
        train_step(*batch(seed))
        its_train_step(*batch(seed))
        assert not changed(state(expected), state(step))
    assert step.counters()["applied_steps"] == 4 // steps


@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_an_exception_between_the_two(mode, steps):
    step, networks, train_step = manual(dynamic(), gradient_accumulation_steps=steps)
    expected, _, its_train_step = manual(dynamic(), gradient_accumulation_steps=steps)
    for seed in range(3):
        with pytest.raises(Interrupted):
            x, y = step.begin(*batch(10 + seed))
            networks[0](x, y)
            raise Interrupted
        train_step(*batch(seed))
        its_train_step(*batch(seed))
        assert not changed(state(expected), state(step))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_an_exception_within_the_forward_that_is_differentiated(mode):
    step, networks, train_step = manual(dynamic())
    expected, _, its_train_step = manual(dynamic())

    def forward(x, y):
        step.scale(networks[0](x, y))
        raise Interrupted

    grad = mindspore.grad(forward, None, step.parameters)
    for seed in range(2):
        with pytest.raises(Interrupted):
            grad(*step.begin(*batch(10 + seed)))
        train_step(*batch(seed))
        its_train_step(*batch(seed))
        assert not changed(state(expected), state(step))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_refused_gradients_leave_a_step_that_can_be_given_up(mode):
    step, networks, train_step = manual(dynamic())
    expected, _, its_train_step = manual(dynamic())
    networks[0](*step.begin(*batch(10, overflows=True)))
    with pytest.raises(ValueError, match="got 2 arguments"):
        step.end(zeros(step.parameters), ())
    train_step(*batch(0))
    its_train_step(*batch(0))
    assert not changed(state(expected), state(step))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_state_that_appears_is_restored(mode):
    """Though the beginning and the end were compiled before there was any."""
    network = regression()
    network.norms = nn.CellList([])

    def loss_of(x, y):
        for its in network.norms:
            x = its(x)
        return network(x, y)

    step = ManualStep(network, adam(network), dynamic()).set_train()
    train_step = train_step_of(step, [loss_of])
    train_step(*batch(0))
    norm = nn.BatchNorm1d(FEATURES).set_train()
    network.norms.append(norm)
    with pytest.warns(RuntimeWarning, match="moving_mean.* which appeared after construction"):
        assert not bool(train_step(*batch(1))[1])
    before = norm.moving_mean.asnumpy().copy()
    assert bool(train_step(*batch(2, overflows=True))[1])
    np.testing.assert_array_equal(norm.moving_mean.asnumpy(), before)
    assert not bool(train_step(*batch(3))[1])
    assert not np.array_equal(norm.moving_mean.asnumpy(), before)
    # One that never ended, too.
    before = norm.moving_mean.asnumpy().copy()
    loss_of(*step.begin(*batch(4, overflows=True)))
    assert not np.array_equal(norm.moving_mean.asnumpy(), before)
    step.begin(*batch(5))
    np.testing.assert_array_equal(norm.moving_mean.asnumpy(), before)
