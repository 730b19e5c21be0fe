"""flush() ends a partial cycle, averaged over the calls that it had; FlushAccumulation calls it at epoch end."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import dataset, nn
from mindspore.train import Model
from support.linear_pair import First, Trained, arrays, momentum
from support.npu_networks import BACKWARD, INNOCENT, OnNpu, inputs_for, optimizers_of

from ms_lossscale import DynamicLossScale, FlushAccumulation, ScaledTrainOneStepCell, emulation


@quick_in_graph_mode
def test_knows_what_the_register_said(mode):
    with emulation.saturation_mode() as register:
        network = OnNpu("network")
        cell = ScaledTrainOneStepCell(
            network, optimizers_of([network])[0], DynamicLossScale(16.0), gradient_accumulation_steps=3
        ).set_train()
        for cycle, (behaviour, after_the_call, skipped) in enumerate(
            [(INNOCENT, register.clear, 0), (BACKWARD, register.clear, 1), (INNOCENT, register.raise_status, 1)]
        ):
            cell(*inputs_for(behaviour))
            # What other work leaves in the register is none of this cycle's business.
            after_the_call()
            cell.flush()
            counters = cell.counters()
            assert (counters["applied_steps"], counters["skipped_steps"]) == (cycle + 1 - skipped, skipped)


class Recorder(mindspore.train.Callback):
    """Notes how many steps have been applied when an epoch begins."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.applied = cell, []

    def on_train_epoch_begin(self, run_context):
        self.applied.append(self.cell.counters()["applied_steps"])


@quick_in_graph_mode
@pytest.mark.parametrize("sink", [False, *slow(True)], ids=["no_sink", "sink"])
def test_the_callback_flushes_at_the_end_of_each_epoch(mode, sink):
    epochs, rows = 3, [arrays(seed) for seed in range(5)]
    trained = Trained("scaled", steps=2)
    for _ in range(epochs):
        for x, _, y in rows:
            trained.control.call([(x, y)])
        trained.control.flush()
    columns = [np.concatenate([row[0] for row in rows]), np.concatenate([row[2] for row in rows])]
    batches = dataset.NumpySlicesDataset(tuple(columns), ["x", "y"], shuffle=False).batch(len(rows[0][0]))
    recorder = Recorder(trained.cell)
    Model(trained.cell).train(epochs, batches, callbacks=[recorder, FlushAccumulation()], dataset_sink_mode=sink)
    trained.compare()
    # Cycles of two, two and one.
    assert recorder.applied == [0, 3, 6]
    assert trained.cell.counters()["applied_steps"] == 9


@pytest.mark.slow
def test_the_callback_serves_several_networks(mode):
    rows = [arrays(seed) for seed in range(3)]
    trained = Trained("alternating", steps=2, every=(1, 2))
    for _ in range(2):
        for x0, x1, y in rows:
            trained.control.call([(x0, y), (x1, y)])
        trained.control.flush()
    columns = tuple(np.concatenate(column) for column in zip(*rows))
    batches = dataset.NumpySlicesDataset(columns, ["x0", "x1", "y"], shuffle=False).batch(len(rows[0][0]))
    Model(trained.cell).train(2, batches, callbacks=[FlushAccumulation()], dataset_sink_mode=False)
    trained.compare()


@pytest.mark.slow
def test_the_callback_says_what_it_needs(mode):
    network = First()
    cell = nn.TrainOneStepCell(network, momentum(network.trainable_params()))
    x, _, y = arrays()
    batches = dataset.NumpySlicesDataset((x, y), ["x", "y"]).batch(len(x))
    with pytest.raises(TypeError, match=r"'FlushAccumulation'.*'TrainOneStepCell'"):
        Model(cell).train(1, batches, callbacks=[FlushAccumulation()], dataset_sink_mode=False)
