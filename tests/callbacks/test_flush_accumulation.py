"""flush() ends a partial cycle, averaged over the calls that it had; FlushAccumulation calls it at epoch end."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import Tensor, dataset, nn
from mindspore.train import Model, RunContext
from mindspore.train.callback import _InternalCallbackParam
from support.linear_pair import First, Trained, arrays, momentum
from support.networks import Around
from support.training import changed, state

from ms_lossscale import DynamicLossScale, FlushAccumulation, ScaledTrainOneStepCell


@quick_in_graph_mode
@pytest.mark.parametrize("kind, sink", [("scaled", False), *slow(("scaled", True), ("alternating", False))])
def test_the_callback_flushes_at_the_end_of_each_epoch(mode, kind, sink):
    """Cycles of two, two and one."""
    rows = [arrays(seed) for seed in range(5)]
    trained, by_hand = (Trained(kind, steps=2) for _ in range(2))
    for _ in range(2):
        for seed in range(5):
            by_hand.call_cell(seed)
        by_hand.cell.flush()
    columns = [np.concatenate(column) for column in zip(*rows)]
    columns = tuple(columns[::2] if kind == "scaled" else columns)
    batches = dataset.NumpySlicesDataset(columns, shuffle=False).batch(len(rows[0][0]))
    Model(trained.cell).train(2, batches, callbacks=[FlushAccumulation()], dataset_sink_mode=sink)
    assert not changed(state(trained.cell), state(by_hand.cell))
    counters = trained.cell.counters()
    assert {each["applied_steps"] for each in (counters if kind == "alternating" else [counters])} == {6}


def accumulating():
    network = First()
    optimizer = momentum(network.trainable_params())
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(), gradient_accumulation_steps=2)


@quick_in_graph_mode
def test_the_callback_flushes_what_data_sinking_has_wrapped(mode):
    """As on Ascend and GPU; on CPU, MindSpore sinks no data."""
    cell = accumulating()
    x, _, y = arrays()
    cell(Tensor(x), Tensor(y))
    params = _InternalCallbackParam(network=cell, train_network=Around(cell))
    FlushAccumulation().on_train_epoch_end(RunContext(params))
    assert cell.counters()["applied_steps"] == 1


def test_the_callback_says_what_it_needs():
    network = First()
    cell = nn.TrainOneStepCell(network, momentum(network.trainable_params()))
    x, _, y = arrays()
    batches = dataset.NumpySlicesDataset((x, y), ["x", "y"]).batch(len(x))
    with pytest.raises(TypeError, match=r"'FlushAccumulation'.*'TrainOneStepCell'"):
        Model(cell).train(1, batches, callbacks=[FlushAccumulation()], dataset_sink_mode=False)


class Passing(Around):
    """Holds a training cell."""

    def flush(self):
        self.network.flush()


@quick_in_graph_mode
def test_the_callback_takes_a_holder_that_passes_it_on(mode):
    cell = accumulating()
    x, _, y = arrays()
    batches = dataset.NumpySlicesDataset((x, y), ["x", "y"]).batch(len(x))
    Model(Passing(cell)).train(1, batches, callbacks=[FlushAccumulation()], dataset_sink_mode=False)
    assert cell.counters()["applied_steps"] == 1
