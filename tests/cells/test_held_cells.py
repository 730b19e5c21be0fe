"""Cells of this package as parts of other Cells: the names of what they hold, two in one graph, and checkpoints."""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops
from support.held_cells import CELLS, Holder, adam, holds, names, scale
from support.linear_pair import Trained, arrays
from support.manual_training import batch, regression
from support.training import changed, same_bits, state

import ms_lossscale as ls

GOLDEN = Path(__file__).parents[1] / "golden" / "held_0_5"


def own(cell):  # What the networks do not have.
    networks = cell.networks if isinstance(cell, ls.ManualStep) else [cell.network]
    others = {id(parameter) for network in networks for parameter in network.get_parameters()}
    return [parameter for parameter in cell.get_parameters() if id(parameter) not in others]


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", CELLS)
def test_the_holders_prefix_comes_before_the_names_that_the_cell_gives(mode, kind):
    cell = CELLS[kind]("critics_")
    alone = {id(parameter): parameter.name for parameter in own(cell)}
    inner = Holder(cell, CELLS[kind]("actors_"))
    for holder, prefix in (
        (None, "critic_train."),
        (lambda: nn.CellList([inner]), "0.critic_train."),
        (lambda: Holder(nn.CellList([inner])), "critic_train.0.critic_train."),
    ):
        if holder is not None:
            holder()
        renamed = [parameter for parameter in own(cell) if parameter.name != prefix + alone[id(parameter)]]
        if kind == "scaled":
            # As in a held cell of MindSpore's, where its learning rate is in a Cell inside.
            assert all(parameter.name.startswith(f"{prefix}optimizer.") for parameter in renamed)
            assert f"{prefix}optimizer.learning_rate.learning_rate" in names(cell)
        else:
            assert renamed == []
    assert not [name for name in names(inner) if "._" in name or name.startswith("_")]
    assert len(set(names(inner))) == len(names(inner))
    # What a user reads has these names, too.
    assert {*cell.ema_parameters(), *cell.forward_state_names()} < set(names(cell))


@quick_in_pynative_mode
@pytest.mark.parametrize("of_stock", [False, True])
def test_a_checkpoint_of_a_holder_of_mindspores_cell_loads(mode, of_stock):
    def trained(make):
        network = regression(0, "net.")
        holder = Holder(make(network, adam(network)).set_train()).set_train()
        for seed in range(3):
            holder.critic_train(*batch(seed))
        return holder

    stock = trained(nn.TrainOneStepCell)
    ours = trained(lambda *of: ls.ScaledTrainOneStepCell(*of, None if of_stock else scale()))
    mindspore.save_checkpoint(stock, "stock.ckpt")
    loaded = mindspore.load_checkpoint("stock.ckpt")
    missing, unexpected = mindspore.load_param_into_net(ours, loaded)
    assert unexpected == [] and loaded.keys() < state(ours).keys()
    assert all(name.startswith(("critic_train.loss_scale.", "critic_train.step_counters.")) for name in missing)
    assert not changed({name: value.asnumpy() for name, value in loaded.items()}, state(stock))


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", CELLS)
def test_what_version_0_5_saved_under_paths_loads(mode, kind):
    cell = CELLS[kind]()
    holder = Holder(cell)
    saved = mindspore.load_checkpoint(str(GOLDEN / f"{kind}_held.ckpt"))
    values = {name: value.asnumpy() for name, value in saved.items()}
    with pytest.warns(RuntimeWarning, match=r"names that version 0\.5 gave .*'critic_train\.\S+'\. They are loaded"):
        assert cell.load_state_dict(saved) == ([], [])
    alone = mindspore.load_checkpoint(str(GOLDEN / f"{kind}_alone.ckpt"))
    reference = CELLS[kind]()
    assert reference.load_state_dict(alone) == ([], [])
    assert all(map(same_bits, holds(cell), holds(reference)))
    # What it saves now is under other names, which load without a word.
    mindspore.save_checkpoint(holder, "holder.ckpt")
    assert cell.load_state_dict(mindspore.load_checkpoint("holder.ckpt")) == ([], [])
    assert values.keys() != state(holder).keys()


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", CELLS)
def test_a_name_begins_the_names_of_all_but_the_networks_parameters(mode, kind):
    named, nameless = CELLS[kind](name="critic"), CELLS[kind]()
    its_own = {parameter.name for parameter in own(named)}
    # What runs after an update is the user's.
    assert {name for name in its_own if not name.startswith("critic.")} == {"updates"}
    assert [name.replace("critic.", "") for name in names(named)] == names(nameless)
    assert not [name for name in set(names(named)) - its_own if "critic." in name]
    mindspore.save_checkpoint(named, "named.ckpt")
    assert CELLS[kind](name="critic").load_state_dict(mindspore.load_checkpoint("named.ckpt")) == ([], [])


@pytest.mark.parametrize("kind", ["scaled", *slow("alternating", "simultaneous")])
def test_two_cells_with_names_in_one_compiled_function(mode, kind):
    """In PyNative mode, MindSpore may round in other places than in the parts that it compiles else."""
    alone, *cells = (Trained(kind, steps=2, ema_decay=0.9, name=name).cell for name in (None, "critic", "actor"))
    for cell, prefix in zip(cells, ("critics_", "actors_")):
        cell.network.update_parameters_name(prefix)
    critic, actor = cells

    @mindspore.jit
    def train_step(*inputs):
        loss = critic(*inputs)[0]
        return loss, actor(ops.depend(inputs[0], loss), *inputs[1:])[0]

    for call in (train_step, alone):
        for seed in range(5):
            call(*map(Tensor, arrays(seed, (seed == 1, seed == 1))[:: 2 if kind == "scaled" else 1]))
    for cell in cells:
        for value, expected in zip(holds(cell), holds(alone)):
            np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert cell.counters() == alone.counters()
