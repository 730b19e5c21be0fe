"""flush() ends a partial window, averaged over the calls that it had; FlushAccumulation calls it at epoch end."""

import mindspore
import numpy as np
import pytest
from mindspore import dataset, nn
from mindspore.train import Model
from support.linear_pair import CELLS, First, Trained, arrays, momentum
from support.networks import batch, batch_for
from support.resume_mid_window import Normalised
from support.training import changed, same_bits, state
from test_accumulation import Saturating, saturating_batch

from ms_lossscale import DynamicLossScale, FlushAccumulation, ScaledTrainOneStepCell, emulation

pytestmark = pytest.mark.long

# Each letter is a call: it overflows nowhere (.), in the first network (1) or the second (2); | is a flush. Windows
# have three calls.
CALLS = "|.|..|...|1.|.|.1|..|2|..2|...||.|..."


@pytest.mark.parametrize(
    "kind, every",
    [("scaled", None), ("simultaneous", None), ("alternating", None), ("alternating", (1, 2))],
    ids=["scaled", "simultaneous", "alternating", "alternating_every"],
)
def test_a_partial_window_is_averaged_over_its_calls(mode, kind, every):
    # The norm that clipping sees is the mean's too; one cell is enough to show it.
    further = {"clip_norm": 2.0, "ema_decay": 0.75} if kind == "scaled" else {}
    trained = Trained(kind, steps=3, every=every, **further)
    for seed, letter in enumerate(CALLS):
        if letter == "|":
            before, was_empty = state(trained.cell), len(CALLS[:seed].split("|")[-1]) % 3 == 0
            trained.flush()
            # With nothing accumulated, nothing at all happens.
            assert bool(changed(before, state(trained.cell))) != was_empty
        else:
            trained.call(seed, (letter == "1", letter == "2"))


@pytest.mark.parametrize("kind", CELLS)
def test_does_nothing_without_accumulation(kind):
    cell = Trained(kind).cell
    before = state(cell)
    cell.flush()
    assert changed(before, state(cell)) == set()


def test_does_nothing_after_a_step_without_accumulation(mode):
    trained = Trained("scaled")
    trained.call()
    before = state(trained.cell)
    trained.cell.flush()
    assert changed(before, state(trained.cell)) == set()


def test_undoes_the_statistics_of_a_partial_window(mode):
    network = Normalised()
    cell = ScaledTrainOneStepCell(
        network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(), gradient_accumulation_steps=3
    ).set_train()
    cell(*batch(0))
    cell.flush()
    statistics = (network.norm.moving_mean, network.norm.moving_variance)
    before = [parameter.asnumpy().copy() for parameter in statistics]
    cell(*batch_for(True, 1))
    cell(*batch(2))
    cell.flush()
    assert all(same_bits(value, parameter.asnumpy()) for value, parameter in zip(before, statistics))
    cell(*batch(3))
    cell.flush()
    assert not any(same_bits(value, parameter.asnumpy()) for value, parameter in zip(before, statistics))
    assert cell.counters() == {"applied_steps": 2, "skipped_steps": 1, "consecutive_skipped_steps": 0}


def test_knows_what_the_register_said(mode):
    with emulation.saturation_mode() as register:
        network = Saturating("only")
        cell = ScaledTrainOneStepCell(
            network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale(2.0**10), gradient_accumulation_steps=3
        ).set_train()
        for window, (overflow, after_the_call, skipped) in enumerate(
            [(False, register.clear, 0), (True, register.clear, 1), (False, register.raise_status, 1)]
        ):
            cell(*saturating_batch(overflow, window))
            # What other work leaves in the register is none of this window's business.
            after_the_call()
            cell.flush()
            counters = cell.counters()
            assert (counters["applied_steps"], counters["skipped_steps"]) == (window + 1 - skipped, skipped)


def test_a_scale_set_before_flush_is_the_next_windows(mode):
    trained = Trained("scaled", steps=3, window=1)
    trained.call(0)
    trained.cell.set_loss_scale(2.0**5)
    trained.cell.flush()
    assert trained.cell.get_loss_scale() == 2.0**5
    assert trained.call_cell(1)[2].asnumpy() == 2.0**5


class Recorder(mindspore.train.Callback):
    """Notes how many steps have been applied when an epoch begins."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.applied = cell, []

    def on_train_epoch_begin(self, run_context):
        self.applied.append(self.cell.counters()["applied_steps"])


@pytest.mark.parametrize("sink", [False, True], ids=["no_sink", "sink"])
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
    # Windows of two, two and one.
    assert recorder.applied == [0, 3, 6]
    assert trained.cell.counters()["applied_steps"] == 9


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


def test_the_callback_says_what_it_needs(mode):
    network = First()
    cell = nn.TrainOneStepCell(network, momentum(network.trainable_params()))
    x, _, y = arrays()
    batches = dataset.NumpySlicesDataset((x, y), ["x", "y"]).batch(len(x))
    with pytest.raises(TypeError, match=r"'FlushAccumulation'.*'TrainOneStepCell'"):
        Model(cell).train(1, batches, callbacks=[FlushAccumulation()], dataset_sink_mode=False)
