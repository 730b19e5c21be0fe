"""Scales that follow a schedule, or are set by hand at a stage boundary, in every cell and with accumulation."""

import numpy as np
import pytest
from mindspore import Tensor, dataset
from mindspore.train import Callback, Model
from support.linear_pair import CELLS, NETWORK_INPUTS, First, Second, Trained, arrays, momentum

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    FlushAccumulation,
    ScaledTrainOneStepCell,
    ScheduledLossScale,
    SimultaneousTrainOneStepCell,
)

pytestmark = pytest.mark.long


def cell_of(kind, loss_scale, **keywords):
    networks = [First()]
    if kind == "scaled":
        return ScaledTrainOneStepCell(networks[0], momentum([networks[0].weight]), loss_scale, **keywords).set_train()
    networks.append(Second(networks[0]))
    optimizers = [momentum([network.weight]) for network in networks]
    make = SimultaneousTrainOneStepCell if kind == "simultaneous" else AlternatingTrainOneStepCell
    return make(networks, optimizers, loss_scale, network_inputs=NETWORK_INPUTS, **keywords).set_train()


def call(cell, kind, seed, overflows):
    x0, x1, y = (Tensor(array) for array in arrays(seed, overflows))
    output = cell(x0, y) if kind == "scaled" else cell(x0, x1, y)
    return output[2].asnumpy().tolist()


@pytest.mark.parametrize("kind, steps", [("scaled", 1), ("scaled", 2), ("simultaneous", 1), ("alternating", 2)])
def test_a_schedule_counts_windows_skipped_ones_included(mode, kind, steps):
    cell = cell_of(kind, ScheduledLossScale([2, 5, 6], [2.0**8, 2.0**10, 2.0**4]), gradient_accumulation_steps=steps)
    # One value for each step of the cell; the last one holds on.
    schedule = [2.0**8] * 2 + [2.0**10] * 3 + [2.0**4] * 3
    for window, scale in enumerate(schedule):
        for micro_step in range(steps):
            # The steps 1 and 4 are skipped, the last ones before a milestone.
            overflows = (window in (1, 4) and micro_step == 0,) * 2
            used = call(cell, kind, window * steps + micro_step, overflows)
            assert used == ([scale] * 2 if kind == "alternating" else scale)
    counters = cell.counters()
    for each in counters if kind == "alternating" else [counters]:
        assert each == {"applied_steps": 6, "skipped_steps": 2, "consecutive_skipped_steps": 0}


def test_flushed_windows_count_too(mode):
    cell = cell_of("scaled", ScheduledLossScale([1, 2], [2.0**8, 2.0**10]), gradient_accumulation_steps=3)
    assert call(cell, "scaled", 0, (False, False)) == 2.0**8
    cell.flush()
    assert cell.get_loss_scale() == 2.0**10
    assert call(cell, "scaled", 1, (False, False)) == 2.0**10


def test_each_alternating_network_counts_its_own_turns(mode):
    cell = cell_of(
        "alternating",
        [ScheduledLossScale([2, 3], [2.0**8, 2.0**10]), ScheduledLossScale([1, 2], [2.0**4, 2.0**6])],
        every=(1, 3),
    )
    used = [call(cell, "alternating", seed, (False, False)) for seed in range(6)]
    assert [scales[0] for scales in used] == [2.0**8] * 2 + [2.0**10] * 4
    # Its turns are the calls 3 and 6; on the others it shows its present scale.
    assert [scales[1] for scales in used] == [2.0**4] * 3 + [2.0**6] * 3


class Stage(Callback):
    """A tuner's callback: in each epoch another scale, set by hand; and the scales that the steps say they used."""

    def __init__(self, cell, scales):
        super().__init__()
        self.cell, self.scales, self.used = cell, list(scales), []

    def on_train_epoch_begin(self, run_context):
        self.cell.set_loss_scale(self.scales.pop(0))

    def on_train_step_end(self, run_context):
        self.used.append(run_context.original_args().net_outputs[2].asnumpy().tolist())


def rows_of(kind, count):
    columns = [np.concatenate(column) for column in zip(*(arrays(seed) for seed in range(count)))]
    if kind == "scaled":
        columns.pop(1)
    names = ["x0", "x1", "y"][-len(columns) :]
    return dataset.NumpySlicesDataset(tuple(columns), names, shuffle=False).batch(len(columns[0]) // count)


@pytest.mark.parametrize("kind", CELLS)
def test_a_callback_sets_the_scale_of_each_stage(mode, kind):
    cell = cell_of(kind, DynamicLossScale(2.0**16), gradient_accumulation_steps=2)
    stage = Stage(cell, [2.0**4, 2.0**12, 2.0**8])
    Model(cell).train(3, rows_of(kind, 3), callbacks=[stage, FlushAccumulation()], dataset_sink_mode=False)
    used = [scales[0] if kind == "alternating" else scales for scales in stage.used]
    # Each epoch is a full window and a flushed one, so that the stage begins with a window.
    assert used == [2.0**4] * 3 + [2.0**12] * 3 + [2.0**8] * 3
    if kind == "alternating":
        assert all(first == second for first, second in stage.used)


def test_a_stage_that_begins_within_a_window_counts_from_the_next(mode):
    cell = cell_of("scaled", DynamicLossScale(2.0**16), gradient_accumulation_steps=2)
    stage = Stage(cell, [2.0**4, 2.0**12])
    Model(cell).train(2, rows_of("scaled", 3), callbacks=[stage], dataset_sink_mode=False)
    # Not flushed: the fourth call, the first of the second stage, ends a window that began at the third.
    assert stage.used == [2.0**4] * 4 + [2.0**12] * 2


def test_a_scale_set_by_hand_does_not_change_the_training(mode):
    trained = Trained("scaled", scale=2.0**10, window=None, steps=2, clip_norm=0.5)
    for seed in range(4):
        trained.call(seed)
    trained.cell.set_loss_scale(2.0**3)
    for verdict in trained.verdicts:
        verdict.law.scale = 2.0**3
    for seed in range(4, 8):
        trained.call(seed)
