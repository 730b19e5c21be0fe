"""A training cell in mindspore.Model: callbacks, data sinking, evaluation."""

import re

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import Model, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor
from support.networks import BATCH, FEATURES, Linear
from support.training import assert_equal_weights, same_bits, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

STEPS = 6


def dataset():
    """Six batches of a linear problem."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, FEATURES)).astype(np.float32)
    y = x @ np.float32([[100.0], [-200.0], [300.0]])
    return GeneratorDataset(list(zip(x, y)), ["x", "y"], shuffle=False).batch(BATCH)


def too_large_a_scale():
    """
    One overflow, then clean steps at 2**26. At 2**126 the gradients, of the order of 100, are infinite and the loss is
    not: LossMonitor takes an infinite loss for the end of the training.
    """
    return DynamicLossScale(2.0**126, backoff_factor=2.0**-100, max_loss_scale=2.0**126)


def momentum(network):
    return nn.Momentum(network.trainable_params(), 0.05, 0.9)


class Record(Callback):
    """Keeps what each step gave."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def step_end(self, run_context):
        self.outputs.append(run_context.original_args().net_outputs)


@quick_in_graph_mode
@pytest.mark.parametrize("sink", [*slow(True), False], ids=["sink", "no_sink"])
def test_trains_with_the_stock_callbacks(mode, sink, tmp_path, capsys):
    network, expected = Linear(), Linear()
    cell, record = ScaledTrainOneStepCell(network, momentum(network), too_large_a_scale()), Record()
    checkpoints = ModelCheckpoint("cell", str(tmp_path), CheckpointConfig(save_checkpoint_steps=STEPS))
    callbacks = [LossMonitor(), TimeMonitor(), checkpoints, record]
    Model(cell).train(2, dataset(), callbacks=callbacks, dataset_sink_mode=sink)
    assert cell.counters() == {"applied_steps": 2 * STEPS - 1, "skipped_steps": 1, "consecutive_skipped_steps": 0}
    assert cell.get_loss_scale() == 2.0**26
    # The oracle: the unscaled stock cell on all batches but the first.
    stock_cell = nn.TrainOneStepCell(expected, momentum(expected)).set_train()
    batches = [batch for _ in range(2) for batch in dataset().create_tuple_iterator()]
    losses = [float(stock_cell(*batch)) for batch in batches[1:]]
    assert_equal_weights(network, expected)
    if not sink:  # When data is sunk, a callback sees the epoch's last step only.
        assert [bool(overflow) for _, overflow, _ in record.outputs] == [True] + [False] * (2 * STEPS - 1)
        assert [float(loss) for loss, _, _ in record.outputs[1:]] == losses
    # Unscaled; LossMonitor prints all digits of a float32.
    printed = np.float32(re.findall(r"loss is (\S+)", capsys.readouterr().out))
    if sink:
        assert printed[-1] == np.float32(losses[-1])
    else:
        np.testing.assert_array_equal(printed[1:], np.float32(losses))
    # What ModelCheckpoint wrote last is all that the cell holds.
    newest = max(tmp_path.glob("cell*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    saved = mindspore.load_checkpoint(str(newest))
    for name, value in state(cell).items():
        assert same_bits(saved[name].asnumpy(), value), name
