"""A forward of an AlternatingTrainOneStepCell that raises in PyNative mode: the next call goes on with this network,
and everything is as if nothing had been raised, bit for bit."""

import itertools

import mindspore
import numpy as np
import pytest
from conftest import slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.in_mode import in_mode
from support.training import changed, state

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell

CALLS = 9
# In which call the forward of which network raises.
RAISED = {1: 1, 3: 2, 4: 1, 5: 1, 7: 2}
OVERFLOWS = {2: 0, 4: 0, 5: 1, 7: 1}
INPUTS = [(2 * i, 2 * i + 1) for i in range(3)]


class Raises(nn.Cell):
    """Its gradients contain `steep`, in float16. Its forward counts its runs, and raises while it is told to."""

    def __init__(self, name, value, returns_aux=False):
        super().__init__()
        self.weight = Parameter(Tensor(np.full(2, value, np.float32)), name=f"{name}.weight")
        self.count = Parameter(Tensor(0.0, mstype.float32), name=f"{name}.count", requires_grad=False)
        self.one, self.returns_aux, self.raises = Tensor(1.0, mstype.float32), returns_aux, False

    def construct(self, x, steep):
        ops.assign(self.count, self.count + self.one)
        if self.raises:
            raise ValueError("on purpose")
        loss = (self.weight * self.weight * x).sum() + (self.weight.astype(mstype.float16) * steep).sum()
        return (loss, self.weight * x) if self.returns_aux else loss


def batch(call):
    rng = np.random.default_rng(call)
    steep = [60000.0 if OVERFLOWS.get(call) == i else 0.0 for i in range(3)]
    return [each for its in steep for each in (Tensor(rng.normal(size=2), mstype.float32), Tensor(its, mstype.float16))]


def make_cell(value=1.0, **keywords):
    aux = keywords.get("has_aux", [False] * 3)
    networks = [Raises(f"n{i}", value + i, returns_aux=aux[i]) for i in range(3)]
    optimizers = [nn.Momentum(network.trainable_params(), 0.125, 0.5) for network in networks]
    scale = DynamicLossScale(2.0**2, scale_window=2)
    return AlternatingTrainOneStepCell(networks, optimizers, scale, network_inputs=INPUTS, **keywords).set_train()


def flat(outputs):
    return [each for its in outputs for each in (flat(its) if isinstance(its, tuple) else [its.asnumpy()])]


def raise_in(cell, number, call):
    network = cell.network[number]
    network.raises = True
    with pytest.raises(ValueError, match="on purpose"):
        cell(*batch(call))
    network.raises = False


@pytest.fixture
def in_pynative_mode():
    with in_mode(mindspore.PYNATIVE_MODE):
        yield


SETTINGS = {
    "plain": {},
    "cycles": {"gradient_accumulation_steps": 2},
    "turns": {"every": (3, 1, 2)},
    "cycles and turns": {"gradient_accumulation_steps": 2, "every": (2, 1, 2)},
    "aux": {"has_aux": [True, True, False], "every": (1, 1, 2)},
    "dropped calls": {"gradient_accumulation_steps": 3, "drop_overflowed_calls": True, "ema_decay": 0.5},
    "retries": {"max_retries": 1, "clip_norm": 1.0},
}
WAYS = ("in place", "load_param_into_net", "load_state_dict")
QUICK = [("plain", WAYS[0]), ("cycles and turns", WAYS[2]), ("aux", WAYS[1])]
SLOW = [pair for pair in itertools.product(SETTINGS, WAYS) if pair not in QUICK]


@pytest.mark.parametrize("name, how", [*QUICK, *slow(*SLOW)])
def test_training_goes_on_as_if_nothing_had_been_raised(in_pynative_mode, name, how):
    control, cell = make_cell(**SETTINGS[name]), make_cell(**SETTINGS[name])
    for call in range(CALLS):
        wanted = control(*batch(call))
        if call in RAISED:
            raise_in(cell, RAISED[call], call)
            if how != "in place":
                mindspore.save_checkpoint(cell, "cell.ckpt")
                cell, loaded = make_cell(7.0, **SETTINGS[name]), mindspore.load_checkpoint("cell.ckpt")
                if how == "load_state_dict":
                    cell.load_state_dict(loaded)
                else:
                    mindspore.load_param_into_net(cell, loaded)
        if call == 3:  # Twice in one call.
            raise_in(cell, 2, call)
        outputs = cell(*batch(call))
        if how == "in place" or call not in RAISED:
            for seen, value in zip(flat(outputs), flat(wanted)):
                np.testing.assert_array_equal(seen, value)
        assert changed(state(cell), state(control)) == set(), call
    steps = [list(each.values())[:2] for each in cell.counters()]
    assert all(applied and (skipped or name == "dropped calls") for applied, skipped in steps[:2]) or name == "retries"


class Pair:
    """A cell, and cells for each of its networks alone, which make the calls that this network has made."""

    def __init__(self, **keywords):
        self.cell, self.alone = make_cell(**keywords), []
        for network in make_cell().network:
            optimizer = nn.Momentum(network.trainable_params(), 0.125, 0.5)
            scale = DynamicLossScale(2.0**2, scale_window=2)
            self.alone.append(ScaledTrainOneStepCell(network, optimizer, scale, **keywords).set_train())

    def call(self, call, raises=False, is_dropped=False):
        """Makes a call, in which network 1 raises or not. Returns the loss of network 0."""
        inputs = batch(call)
        if raises:
            raise_in(self.cell, 1, call)
        else:
            self.cell(*inputs)
        made = [] if is_dropped else self.alone[: 1 if raises else 3]
        return [cell(*inputs[2 * i : 2 * i + 2])[0].asnumpy() for i, cell in enumerate(made)][:1]

    def compare(self):
        for network, counters, alone in zip(self.cell.network, self.cell.counters(), self.alone):
            np.testing.assert_array_equal(network.weight.asnumpy(), alone.network.weight.asnumpy())
            np.testing.assert_array_equal(network.count.asnumpy(), alone.network.count.asnumpy())
            assert counters == alone.counters()


def test_what_ends_a_cycle_begins_with_the_first_network(in_pynative_mode):
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


def test_without_cycles_flush_and_discard_begin_with_the_first_network_too(in_pynative_mode):
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
