"""Scales that follow a schedule, or are set by hand at a stage boundary, in every cell and with accumulation."""

import numpy as np
import pytest
from mindspore import Tensor, dataset
from mindspore.train import Callback, Model
from support.linear_pair import CELLS, NETWORK_INPUTS, First, Second, arrays, momentum

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    FlushAccumulation,
    ScaledTrainOneStepCell,
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
    # Each epoch is a full cycle and a flushed one, so that the stage begins with a cycle.
    assert used == [2.0**4] * 3 + [2.0**12] * 3 + [2.0**8] * 3
    if kind == "alternating":
        assert all(first == second for first, second in stage.used)


def test_a_stage_that_begins_within_a_cycle_counts_from_the_next(mode):
    cell = cell_of("scaled", DynamicLossScale(2.0**16), gradient_accumulation_steps=2)
    stage = Stage(cell, [2.0**4, 2.0**12])
    Model(cell).train(2, rows_of("scaled", 3), callbacks=[stage], dataset_sink_mode=False)
    # Not flushed: the fourth call, the first of the second stage, ends a cycle that began at the third.
    assert stage.used == [2.0**4] * 4 + [2.0**12] * 2
