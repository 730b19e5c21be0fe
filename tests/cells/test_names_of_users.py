"""A Parameter of the user's may have any name: it is saved and loaded like all others."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor
from support.linear_pair import NETWORK_INPUTS, First, Second, arrays, momentum
from support.training import cell_of, changed, state

import ms_lossscale as ls

# They end as names that the package, or an earlier version of it, gives to what it saves itself.
NAMES = [
    "my.clipping.scale",
    "accumulation.wrote_shared_by_all.accumulation.wrote_shared",
    "my.accumulation.micro_steps",
    "my.accumulation.sum_of_weights",
    "my.accumulation.steps",
    "pixels_not_finite",
    "my.skip_reasons",
    "my.scale_is_set",
    "my.forward_state.queue",
]
# The cell itself has none of these names, but might with other arguments.
OF_OTHER_CELLS = ["clipping.scale", "accumulation.micro_steps", "accumulation.steps", "accumulation.sum_of_weights"]


# What versions 0.1 to 0.3 did not save, and what they saved besides.
ADDED = ("accumulation.loss_not_finite", "accumulation.state_not_finite", "accumulation.scale_is_set")
ADDED += ("accumulation.steps", "step_counters.skip_reasons")
REMOVED = {"clipping.scale": Tensor(1.0), "accumulation.wrote_shared": Tensor([True])}


def cell_with(kind, names, **keywords):
    first = First()
    for i, name in enumerate(names):
        own = Parameter(Tensor(np.full(2 + i % 2, 5.0, np.float32)), name=name, requires_grad=i % 2 == 0)
        setattr(first, f"own_{i}", own)
    networks = [first]
    if kind != "scaled":
        networks.append(Second(first))
        keywords["network_inputs"] = NETWORK_INPUTS
    optimizers = [momentum([network.weight]) for network in networks]
    return cell_of(kind, networks, optimizers, ls.DynamicLossScale(2.0**10), clip_norm=1.0, **keywords)


def load_strictly(cell, values):
    assert cell.load_state_dict(values) == ([], [])


def load_with_mindspore(cell, values):
    mindspore.load_param_into_net(cell, {name: Parameter(its, name=name) for name, its in values.items()})


@quick_in_pynative_mode
@pytest.mark.parametrize(("kind", "steps"), [("scaled", 1), ("scaled", 2), *slow(("alternating", 2))])
def test_any_name_loads(mode, kind, steps):
    names = NAMES if steps > 1 else [*NAMES, *OF_OTHER_CELLS]
    x0, x1, y = map(Tensor, arrays())
    for load in (load_strictly, load_with_mindspore):
        cell = cell_with(kind, names, gradient_accumulation_steps=steps)
        values = {name: Tensor(value) for name, value in state(cell).items()}
        values.update((name, Tensor(values[name].asnumpy() + 1)) for name in names)
        load(cell, values)
        assert not changed({name: value.asnumpy() for name, value in values.items()}, state(cell))
        # What MindSpore's own function loaded is looked at in the next call.
        cell(*([x0, y] if kind == "scaled" else [x0, x1, y]))
        held = state(cell)
        assert all(np.array_equal(held[name], values[name].asnumpy()) for name in names)


@quick_in_pynative_mode
def test_what_earlier_versions_did_not_save_is_not_told_by_the_ends_of_names(mode):
    cell = cell_with("scaled", NAMES, gradient_accumulation_steps=2)
    before = state(cell)
    earlier = {name: Tensor(value) for name, value in before.items() if name not in ADDED}
    assert cell.load_state_dict({**earlier, **REMOVED}) == ([], [])
    for name in NAMES:
        missing, unexpected = cell.load_state_dict({key: its for key, its in earlier.items() if key != name}, False)
        assert (missing, unexpected) == ([name], [])
    assert not changed(before, state(cell))
