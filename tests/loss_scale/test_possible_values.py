"""No scale and no count is loaded that training can't have, whatever loads it."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from support.linear_pair import CELLS, Trained, arrays
from support.networks import Linear, batch
from support.training import changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, ScheduledLossScale, SimultaneousTrainOneStepCell
from ms_lossscale.cells.possible_values import PossibleValues

NO_SCALES = [np.inf, np.nan, 0.0, -2.0, 1e-40, 2.0**-127, 2.0**127]
NO_COUNTS = [-1, -5, -(2**31)]
# Of a cycle of two calls: beyond its length, also if its length is told as in 0.3, and a cycle without a call.
NO_CYCLES = [-1, -5, 2, 99, 2 * 2**16 + 2, 2 * 2**16, 3 * 2**16 + 3]


def all_cells():
    """Yields cells with every scale and count that there is."""
    for kind in CELLS:
        yield Trained(kind, steps=2, max_retries=1).cell
    pair = Trained("simultaneous")
    scales = [DynamicLossScale(8.0), ScheduledLossScale([2, 4], [8.0, 4.0])]
    yield SimultaneousTrainOneStepCell(pair.networks, pair.optimizers, scales, network_inputs=[(0, 2), (1, 2)])


def impossible(cell):
    """Returns pairs of a name and an array with an impossible value, for each scale and count of a cell."""
    cases, values_of = [], state(cell)
    for name, value in values_of.items():
        kind = name.rpartition(".")[2]
        values = []
        if kind in ("scale_value", "loss_scale"):
            # In version 0.3, the scale of a cycle is negative after another one was set by hand.
            values = [each for each in NO_SCALES if kind == "scale_value" or not each < 0]
            # Divided by the calls of a cycle, its reciprocal would be subnormal.
            values += [2.0**126] if any("accumulation" in its for its in values_of) else []
        elif kind in ("micro_steps", "calls"):
            values = NO_CYCLES
        elif value.dtype == np.int32 and kind != "global_step":
            values = NO_COUNTS + ([0] if kind in ("every", "window_every") else [])
        cases += [(name, np.full_like(value, each)) for each in values]
    return cases


def shown(value):
    return str(value.item() if value.size == 1 else value.tolist())


def test_load_state_dict_refuses_each():
    seen = set()
    for cell in all_cells():
        before = state(cell)
        for name, value in impossible(cell):
            seen.add(name.rpartition(".")[2])
            with pytest.raises(ValueError, match="Nothing was loaded") as caught:
                cell.load_state_dict({**{key: Tensor(its) for key, its in before.items()}, name: Tensor(value)})
            assert repr(name) in str(caught.value)
            assert f"but got {shown(value)}" in str(caught.value)
        assert changed(before, state(cell)) == set()
    counts = {"applied_steps", "skipped_steps", "consecutive_skipped_steps", "retries", "clean_steps", "overflow_steps"}
    cycles = {"micro_steps", "calls", "windows", "every", "window_every", "steps"}
    counts.add("skip_reasons")
    assert seen == {"scale_value", "loss_scale", *counts, *cycles}


def test_the_next_call_refuses_what_stock_functions_loaded(mode):
    for cell in all_cells():
        inputs = [Tensor(array) for array in arrays()]
        inputs = inputs[1:] if isinstance(cell, ScaledTrainOneStepCell) else inputs
        for name, value in impossible(cell):
            parameter = cell.parameters_dict()[name]
            before = parameter.asnumpy()
            mindspore.load_param_into_net(cell, {name: Parameter(Tensor(value), name=name)})
            for _ in range(2):
                with pytest.raises(ValueError) as caught:
                    cell(*inputs)
                assert repr(name) in str(caught.value)
                assert f"but got {shown(value)}" in str(caught.value)
            parameter.set_data(Tensor(before))


def test_in_a_running_cell(mode, monkeypatch):
    network = Linear()
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), DynamicLossScale(8.0)).set_train()
    cell(*batch(0))
    with monkeypatch.context() as patched:
        # The host does not read them before each step.
        patched.setattr(PossibleValues, "_check", None)
        for seed in range(3):
            cell(*batch(seed))
    saved = state(cell)
    cell.parameters_dict()["loss_scale.scale_value"].set_data(Tensor(np.inf, mindspore.float32))
    for go_on in (lambda: cell(*batch(2)), cell.flush, lambda: cell.find_loss_scale(*batch(2))):
        with pytest.raises(ValueError, match=r"'loss_scale.scale_value'.* but got inf\. .*before you go on"):
            go_on()
    assert changed(saved, state(cell)) == {"loss_scale.scale_value"}
    # Setting the scale mends it, and so does loading.
    cell.set_loss_scale(8.0)
    assert not bool(cell(*batch(2))[1])
    cell.parameters_dict()["loss_scale.clean_steps"].set_data(Tensor(-5, mindspore.int32))
    with pytest.raises(ValueError, match=r"'loss_scale.clean_steps'.* but got -5"):
        cell(*batch(3))
    cell.load_state_dict({name: Tensor(value) for name, value in saved.items()})
    cell(*batch(2))
    assert cell.counters()["applied_steps"] == 5


def test_what_is_unusual_but_possible():
    cell = Trained("scaled", steps=2, scale=8.0, scale_window=3).cell
    for name, value in {
        # A count of a longer window, a plain count of 0.1 and 0.2.
        "loss_scale.clean_steps": np.int32(10**6),
        "accumulation.micro_steps": np.int32(1),
        # Beyond the ceiling of the rule, as if set by hand.
        "loss_scale.scale_value": np.float32(2.0**125),
    }.items():
        cell.load_state_dict({name: Tensor(value)}, strict=False)
        assert state(cell)[name] == value
    # The length is that of this cell. In 0.3, the cycle's scale was negative after another one was set by hand.
    assert state(cell)["accumulation.steps"] == 2
    cell.load_state_dict({"accumulation.loss_scale": Tensor(-8.0, mindspore.float32)}, strict=False)
    assert state(cell)["accumulation.loss_scale"] == 8.0
    assert state(cell)["accumulation.scale_is_set"]
    cell.load_state_dict({"loss_scale.scale_value": Tensor(2.0**-126, mindspore.float32)}, strict=False)
