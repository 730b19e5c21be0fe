"""What was saved within an accumulation cycle goes on in a cell that adds up its calls in the same way. In any other,
the keyword is named, whichever function loads it."""

from pathlib import Path

import mindspore
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor
from support.held_cells import CELLS
from support.refused import refused
from support.token_networks import Tokens, batch, tensors
from support.training import by_sgd, changed, state

from ms_lossscale import DynamicLossScale

GOLDEN = Path(__file__).parents[1] / "golden" / "held_0_5"
# How a cell adds up its calls.
WAYS = {
    "plain": {},
    "weighted": {"weighted": True},
    "dropping": {"drop_overflowed_calls": True},
    "both": {"weighted": True, "drop_overflowed_calls": True},
    "two calls": {"gradient_accumulation_steps": 2},
}
DEFAULTS = {"gradient_accumulation_steps": 3, "drop_overflowed_calls": False, "weighted": False}


def cell_of_tokens(kind="scaled", weighted=False, **keywords):
    """A cell with cycles of three calls, if not others. Its losses are sums over tokens or, without weights, means."""
    each = weighted if isinstance(weighted, list) else [weighted]
    networks = [Tokens(f"{i}", None if has_weight else "mean") for i, has_weight in enumerate(each)]
    keywords = {"gradient_accumulation_steps": 3, **({"weighted": weighted} if kind != "manual" else {}), **keywords}
    return by_sgd(networks, DynamicLossScale(2.0**10), kind=kind, **keywords)


def call(cell, seed=0):
    return cell(*tensors(batch(3, seed)))


def load_with_mindspore(cell, values):  # Of copies, since the cell writes into the memory of what is loaded.
    mindspore.load_param_into_net(cell, {name: Parameter(Tensor(its), name=name) for name, its in values.items()})


def load_strictly(cell, values):
    assert cell.load_state_dict({name: Tensor(value) for name, value in values.items()}) == ([], [])


def check_refused(make, within, between, *words):
    """Checks that a new cell, and one within a cycle, refuses the former; the latter loads."""
    for calls in (0, 5):
        cell = make()
        for seed in range(calls):
            call(cell, seed)
        before = state(cell)
        loaded = {name: Tensor(value) for name, value in within.items()}
        for strict in (True, False):
            refused(lambda: cell.load_state_dict(loaded, strict), ValueError, *words, "Nothing was loaded")  # noqa: B023
        assert not changed(before, state(cell))
        load_with_mindspore(cell, within)
        for go_on in (lambda: call(cell), cell.flush):  # noqa: B023
            refused(go_on, ValueError, *words)
        load_with_mindspore(cell, between)
        call(cell)
        # What it saves now is of a cycle that it has begun.
        load_strictly(make(), state(cell))


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "saved, own",
    [
        *(("plain", "dropping"), ("weighted", "plain"), ("dropping", "plain"), ("both", "both")),
        *slow(*(("plain", "weighted"), ("weighted", "both"), ("both", "dropping"), ("dropping", "weighted"))),
        ("plain", "two calls"),
        *slow(*((way, way) for way in WAYS if way != "both")),
    ],
)
def test_it_goes_on_or_the_keyword_is_named(mode, saved, own):
    begun = cell_of_tokens(**WAYS[saved])
    call(begun)
    within = state(begun)
    begun.flush()
    between = state(begun)
    for keyword, default in DEFAULTS.items():
        was, now = (WAYS[way].get(keyword, default) for way in (saved, own))
        if was != now:
            words = (f"'{keyword}' must be {was}, but got {now}: 'accumulation.micro_steps' is 1", "a flush()")
            return check_refused(lambda: cell_of_tokens(**WAYS[own]), within, between, *words)
    resumed = [cell_of_tokens(**WAYS[own]) for _ in range(2)]
    load_strictly(resumed[0], within)
    load_with_mindspore(resumed[1], within)
    load_strictly(begun, within)
    for cell in (begun, *resumed):
        for seed in range(1, WAYS[own].get("gradient_accumulation_steps", 3)):
            call(cell, seed)
        assert not changed(state(begun), state(cell))
    assert begun.counters()["applied_steps"] == 1


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "kind, own, words",
    [
        ("simultaneous", {"weighted": [True, True]}, f"'weighted' must be {[True, False]}, but got {[True, True]}: "),
        ("alternating", {"gradient_accumulation_steps": 2}, "'gradient_accumulation_steps' must be 3, but got 2: "),
        *slow(
            ("alternating", {"weighted": [True, True]}, f"'weighted' must be {[True, False]}, but got {[True, True]}: ")
        ),
        *slow(("simultaneous", {"gradient_accumulation_steps": 2}, "must be 3, but got 2: ")),
    ],
)
def test_of_several_networks_all_are_named(mode, kind, own, words):
    saved = {"weighted": [True, False]}
    begun = cell_of_tokens(kind, **saved)
    call(begun)
    within = state(begun)
    begun.flush()
    check_refused(lambda: cell_of_tokens(kind, **{**saved, **own}), within, state(begun), words, "micro_steps' is 1")


@quick_in_pynative_mode
def test_in_a_cell_without_cycles(mode):
    begun = cell_of_tokens()
    call(begun)
    loaded = {name: Tensor(value) for name, value in state(begun).items()}
    cell = cell_of_tokens(gradient_accumulation_steps=1)
    words = "'gradient_accumulation_steps' must be 3, but got 1: ", "Nothing was loaded"
    refused(lambda: cell.load_state_dict(loaded, False), ValueError, *words)


@quick_in_pynative_mode
def test_a_manual_step(mode):
    """It does not say whether its losses have weights before there is one."""

    def manual(weighted, **keywords):
        step = cell_of_tokens("manual", weighted, **keywords)
        (network,) = step.networks

        def loss_of(*inputs):
            return network(*inputs)[0] if weighted else network(*inputs)

        value_and_grad = step.value_and_grad(loss_of)
        inputs = tensors(batch(3))
        grads = value_and_grad(*step.begin(*inputs))[1]
        step.end(grads, **({"weight": inputs[2].sum()} if weighted else {}))
        return step

    for weighted in (False, True):
        within = state(manual(weighted))
        cells = {way: cell_of_tokens(weighted=way) for way in (False, True)}
        loaded = {name: Tensor(value) for name, value in within.items()}
        words = (f"'weighted' must be {weighted}, but got {not weighted}: ", "Nothing was loaded")
        refused(lambda: cells[not weighted].load_state_dict(loaded, False), ValueError, *words)  # noqa: B023
        assert cells[weighted].load_state_dict(loaded, False)[0] == []
        load_with_mindspore(cells[True], within)
        words = ("'weighted' must be as a ManualStep had it, which load_state_dict can tell",)
        refused(lambda: call(cells[True]), ValueError, *words)  # noqa: B023
        # Into another ManualStep, and from a training cell that does not add up any weights.
        dropping = cell_of_tokens("manual", drop_overflowed_calls=True)
        load_with_mindspore(dropping, within)
        refused(dropping.flush, ValueError, "'drop_overflowed_calls' must be False, but got True")
        resumed = cell_of_tokens("manual")
        load_with_mindspore(resumed, within)
        resumed.flush()
        assert resumed.counters()["applied_steps"] == 1
    plain, step = cell_of_tokens(), cell_of_tokens("manual")
    call(plain)
    load_with_mindspore(step, state(plain))
    refused(step.flush, ValueError, "'accumulation.micro_steps' is within", "accumulation.sum_of_weights is missing")


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["scaled", "manual"])
def test_what_version_0_5_saved_within_a_cycle(mode, kind):
    """It did not save how the calls are added up."""
    saved = mindspore.load_checkpoint(str(GOLDEN / f"{kind}_alone.ckpt"))
    assert "accumulation.settings" not in saved
    same, other = CELLS[kind](), CELLS[kind](drop_overflowed_calls=False)
    assert same.load_state_dict(saved) == ([], [])
    same.flush()
    words = ("'drop_overflowed_calls' must be True, but got False", "Nothing was loaded")
    refused(lambda: other.load_state_dict(saved, False), ValueError, *words)
