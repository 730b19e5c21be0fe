"""LossScaleMonitor(summary_dir=): event files for MindInsight and TensorBoard."""

import csv
from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import MODES
from mindspore.train import Callback
from support.event_files import scalars_for_mindinsight, scalars_for_tensorboard
from support.in_mode import in_mode
from support.linear_pair import Trained, arrays
from support.python_process import check_python
from test_loss_scale_monitor import train

from ms_lossscale import DynamicLossScale, LossScaleMonitor, SimultaneousTrainOneStepCell
from ms_lossscale.callbacks.files import Summary

BATCHES = [arrays(seed, (seed in (1, 2), seed == 2)) for seed in range(5)]


def batches_for(kind, batches=BATCHES):
    return [(x0, y) for x0, _, y in batches] if kind == "scaled" else batches


def batches_with_a_steep_one():
    """The loss of the third is about 2**120, and its gradients, 2**111, are too much for float32 at large scales."""
    finite, overflowing = [BATCHES[i] for i in (0, 3, 4)], BATCHES[1:3]
    factors = (2.0**50, 2.0**50, 2.0**60)
    finite[2] = tuple(np.full_like(array, factor) for array, factor in zip(finite[2], factors))
    return finite + overflowing


class Norms(Callback):
    """Reads the norms after each step."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.after = cell, []

    def on_train_step_end(self, run_context):
        norms = self.cell.grad_norm()
        self.after.append(norms if isinstance(norms, list) else [norms])


def in_float32(scalars):
    return {step: {tag: float(np.float32(value)) for tag, value in tags.items()} for step, tags in scalars.items()}


def tag(network, name, several):
    return f"network_{network}/{name}" if several else name


# Each pair of two values is among them.
@pytest.mark.parametrize(
    ("name", "kind", "accumulation_steps", "retries"),
    [
        pytest.param("graph", "scaled", 1, 0, marks=pytest.mark.slow),
        ("pynative", "scaled", 2, 8),
        pytest.param("pynative", "simultaneous", 1, 8, marks=pytest.mark.slow),
        pytest.param("graph", "simultaneous", 2, 0, marks=pytest.mark.slow),
        pytest.param("graph", "alternating", 1, 8, marks=pytest.mark.slow),
        pytest.param("pynative", "alternating", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_the_files_say_what_the_csv_file_and_the_cell_say(name, kind, accumulation_steps, retries):
    with in_mode(MODES[name]):
        check_files(kind, accumulation_steps, retries)


def check_files(kind, accumulation_steps, retries):
    trained = Trained(kind, scale=2.0**24, steps=accumulation_steps, clip_norm=float("inf"), max_retries=retries)
    norms = Norms(trained.cell)
    monitor = LossScaleMonitor(2, csv="scale.csv", summary_dir="summary")
    train(trained.cell, batches_for(kind, batches_with_a_steep_one()), monitor, others=[norms])
    expected, decisions, tries = {}, {}, {}
    several = kind == "alternating"
    with open("scale.csv", newline="") as file:
        for row in csv.DictReader(file):
            step, network = int(row["step"]), row["network"]
            scalars = expected.setdefault(step, {})
            names = ["loss", "loss_scale", "skipped_steps"]
            scalars.update({tag(network, name, several): float(row[name]) for name in names})
            tries[network] = tries.get(network, 0) + int(row["retries"])
            if retries:
                scalars[tag(network, "retries", several)] = float(tries[network])
            decided = int(row["applied_steps"]) + int(row["skipped_steps"])
            if decided != decisions.get(network, 0):
                its_norms = dict(enumerate(norms.after[step - 1]))
                of_network = {int(network): its_norms[int(network)]} if several else its_norms
                scalars.update({tag(i, "grad_norm", len(its_norms) > 1): norm for i, norm in of_network.items()})
            decisions[network] = decided
    assert len(expected) == 5
    assert [step for step, scalars in expected.items() if any("grad_norm" in tag for tag in scalars)] == list(
        range(accumulation_steps, 6, accumulation_steps)
    )
    assert bool(sum(tries.values())) == bool(retries)
    np.testing.assert_equal(scalars_for_mindinsight(Path("summary")), in_float32(expected))
    np.testing.assert_equal(scalars_for_tensorboard(Path("summary")), in_float32(expected))


@pytest.mark.slow
def test_a_loss_scale_for_each_network():
    trained = Trained("simultaneous")
    scales = [DynamicLossScale(2.0**10), DynamicLossScale(2.0**12)]
    inputs = [(0, 2), (1, 2)]
    cell = SimultaneousTrainOneStepCell(trained.networks, trained.optimizers, scales, network_inputs=inputs).set_train()
    train(cell, BATCHES[:2], LossScaleMonitor(summary_dir="summary"))
    written = scalars_for_mindinsight(Path("summary"))
    assert set(written[1]) == {"loss", "skipped_steps", "network_0/loss_scale", "network_1/loss_scale"}
    assert (written[1]["network_0/loss_scale"], written[1]["network_1/loss_scale"]) == (2.0**10, 2.0**12)
    assert [written[step]["skipped_steps"] for step in (1, 2)] == [0.0, 1.0]


def test_trainings_of_the_same_second_have_files_of_their_own():
    for step in range(3):
        summary = Summary(Path("summary"))
        summary.add(step, {"loss": 1.0})
        summary.close()
    assert not mindspore.SummaryRecord.count
    assert set(scalars_for_mindinsight(Path("summary"))) == {0, 1, 2}
    assert set(scalars_for_tensorboard(Path("summary"))) == {0, 1, 2}


class Breaks(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            raise KeyboardInterrupt


def test_nothing_is_lost_when_the_training_breaks_off():
    trained = Trained("scaled")
    with pytest.raises(KeyboardInterrupt):
        train(trained.cell, batches_for("scaled"), LossScaleMonitor(summary_dir="summary"), others=[Breaks()])
    assert not mindspore.SummaryRecord.count
    assert set(scalars_for_mindinsight(Path("summary"))) == set(scalars_for_tensorboard(Path("summary"))) == {1, 2, 3}


WITHOUT_TENSORBOARD = """
import sys
sys.modules["tensorboardX"] = sys.modules["torch"] = None
import mindspore, numpy as np
from mindspore import dataset, nn
from mindspore.train import Model
from ms_lossscale import LossScaleMonitor, ScaledTrainOneStepCell

net = nn.Dense(4, 1)
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
cell = ScaledTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, 128)
data = np.ones((4, 4), np.float32), np.ones((4, 1), np.float32)
def train(folder):
    batches = dataset.NumpySlicesDataset(data).batch(2)
    Model(cell).train(1, batches, callbacks=[LossScaleMonitor(summary_dir=folder)], dataset_sink_mode=False)
train("summary")
with mindspore.SummaryRecord("other"):
    try:
        train("none")
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_without_tensorboard(tmp_path):
    printed = check_python("-c", WITHOUT_TENSORBOARD, cwd=tmp_path)
    assert "another callback has opened one. Install tensorboardX" in printed
    assert len(scalars_for_mindinsight(Path("summary"))) == 2
    assert not scalars_for_tensorboard(Path("summary"))


@pytest.mark.parametrize(
    ("summary_dir", "error", "message"),
    [
        (3, TypeError, "'summary_dir' must be a path or None, but got"),
        ("", ValueError, r"'summary_dir' must be a folder, but got an empty path: ''\. Pass '\.'"),
        ("no/folder", ValueError, "'summary_dir' must be in a folder that exists"),
        ("file", ValueError, "'summary_dir' must be a folder, but 'file' is a file"),
    ],
)
def test_no_folder(summary_dir, error, message):
    Path("file").touch()
    with pytest.raises(error, match=message):
        LossScaleMonitor(summary_dir=summary_dir)
