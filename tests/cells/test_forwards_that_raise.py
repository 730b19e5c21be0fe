"""What ends a cycle within a call in which a forward of an AlternatingTrainOneStepCell raised, begins with the first
network, though the next call would go on with this one, as the configurations show."""

import contextlib
import itertools

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.in_mode import in_mode
from support.training import by_sgd, state

from ms_lossscale import DynamicLossScale


class Raises(nn.Cell):
    """Its forward counts its runs, and raises while it is told to."""

    def __init__(self, name, value):
        super().__init__()
        self.weight = Parameter(Tensor(np.full(2, value, np.float32)), name=f"{name}.weight")
        self.count = Parameter(Tensor(0.0, mstype.float32), name=f"{name}.count", requires_grad=False)
        self.one, self.raises = Tensor(1.0, mstype.float32), False

    def construct(self, x):
        ops.assign(self.count, self.count + self.one)
        if self.raises:
            raise ValueError("on purpose")
        return (self.weight * self.weight * x).sum()


def batch(call):
    rng = np.random.default_rng(call)
    return [Tensor(rng.normal(size=2), mstype.float32) for _ in range(3)]


def make_cell(**keywords):
    networks, scale = [Raises(f"n{i}", 1.0 + i) for i in range(3)], DynamicLossScale(2.0**2, scale_window=2)
    return by_sgd(networks, scale, 0.125, "alternating", network_inputs=[(0,), (1,), (2,)], **keywords)


def raise_in(cell, number, call):
    network = cell.network[number]
    network.raises = True
    with pytest.raises(ValueError, match="on purpose"):
        cell(*batch(call))
    network.raises = False


class Pair:
    """A cell, and cells for each of its networks alone, which make the calls that this network has made."""

    def __init__(self, **keywords):
        self.cell, self.alone = make_cell(**keywords), []
        for network in make_cell().network:
            self.alone.append(by_sgd(network, DynamicLossScale(2.0**2, scale_window=2), 0.125, **keywords))

    def call(self, call, raises=False, is_dropped=False):
        """Makes a call, in which network 1 raises or not. Returns the loss of network 0."""
        inputs = batch(call)
        if raises:
            raise_in(self.cell, 1, call)
        else:
            self.cell(*inputs)
        made = [] if is_dropped else self.alone[: 1 if raises else 3]
        return [cell(inputs[i])[0].asnumpy() for i, cell in enumerate(made)][:1]

    def compare(self):
        for network, counters, alone in zip(self.cell.network, self.cell.counters(), self.alone):
            np.testing.assert_array_equal(network.weight.asnumpy(), alone.network.weight.asnumpy())
            np.testing.assert_array_equal(network.count.asnumpy(), alone.network.count.asnumpy())
            assert counters == alone.counters()


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_what_ends_a_cycle_begins_with_the_first_network(mode):
    """In the first call of a cycle, within it, and in its last call. Each network has trained on calls of its own."""
    pair = Pair(gradient_accumulation_steps=3)
    cases = itertools.product((1, 2, 3), ("flush", "discard", "load"))
    for number, (at, then) in enumerate(cases):
        before = {name: Tensor(value) for name, value in state(pair.cell).items()}
        for call in range(at):
            losses = pair.call(100 * number + call, raises=call == at - 1, is_dropped=then == "load")
        if then == "load":
            pair.cell.load_state_dict(before)
        else:
            for cell in (pair.cell, *pair.alone):
                getattr(cell, then)()
        pair.compare()
        if then == "flush":  # What a network shows that takes no part.
            pair.cell.set_every((97, 97, 97))
            np.testing.assert_array_equal(pair.cell(*batch(0))[3].asnumpy()[:1], losses)
            pair.cell.set_every((1, 1, 1))
            pair.cell.discard()
        for call in range(3):
            pair.call(100 * number + 50 + call)
        pair.compare()


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_without_cycles_flush_and_discard_begin_with_the_first_network_too(mode):
    for then in ("flush", "discard"):
        cell = make_cell()
        raise_in(cell, 1, 10)
        getattr(cell, then)()
        cell(*batch(11))
        assert [each["applied_steps"] for each in cell.counters()] == [2, 1, 1]


def test_graph_mode_says_that_it_can_not_go_on_within_a_call():
    with in_mode(mindspore.PYNATIVE_MODE):
        cell = make_cell()
        raise_in(cell, 1, 10)
        saved = {name: Tensor(value) for name, value in state(cell).items()}
    with in_mode(mindspore.GRAPH_MODE):
        cell = make_cell()
        cell.load_state_dict(saved)
        with pytest.raises(RuntimeError, match=r"within a call in which network 1 raised.*PYNATIVE_MODE, or call disc"):
            cell(*batch(11))
        cell.discard()
        cell(*batch(11))
    assert [each["applied_steps"] for each in cell.counters()] == [2, 1, 1]


def test_nor_can_it_if_nothing_was_loaded():
    with in_mode(mindspore.PYNATIVE_MODE):
        cell = make_cell()
        raise_in(cell, 1, 10)
    with in_mode(mindspore.GRAPH_MODE), pytest.raises(RuntimeError, match="within a call in which network 1 raised"):
        cell(*batch(11))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_turns_are_not_set_within_a_call(mode):
    cell = make_cell(gradient_accumulation_steps=2)
    raise_in(cell, 1, 10)
    with pytest.raises(RuntimeError, match=r"between two calls, but the last one is to go on with network 1.*discard"):
        cell.set_every((2, 1, 1))
    cell(*batch(11))
    cell.set_every((2, 1, 1))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_an_exception_after_the_whole_call_makes_no_other_call_of_the_next(mode):
    cell = make_cell()
    last = cell._guard.after

    def interrupted(*args):
        last(*args)
        raise InterruptedError

    cell._guard.after = interrupted
    with pytest.raises(InterruptedError):
        cell(*batch(10))
    cell._guard.after = last
    cell(*batch(11))
    assert [each["applied_steps"] for each in cell.counters()] == [2, 2, 2]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_the_loss_of_a_skipped_turn_is_not_remembered(mode, steps):
    cell = make_cell(gradient_accumulation_steps=steps)
    for call in range(steps):
        remembered = cell(*batch(call))[3].asnumpy()[0]
    for call in range(steps):
        inputs = batch(10 + call)
        inputs[0] *= np.inf
        cell.network[1].raises = call == steps - 1
        with pytest.raises(ValueError, match="on purpose") if cell.network[1].raises else contextlib.nullcontext():
            cell(*inputs)
    cell.network[1].raises = False
    assert cell(*inputs)[1].asnumpy()[0]
    cell.set_every((97, 1, 1))
    assert cell(*batch(20))[3].asnumpy()[0] == remembered
