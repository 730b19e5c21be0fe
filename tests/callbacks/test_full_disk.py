"""LossScaleMonitor on a full disk: the training goes on, and what is written can be read."""

import csv
import json

import pytest
from support.python_process import check_python

from ms_lossscale.callbacks.files import CsvFile

resource = pytest.importorskip("resource", reason="files are limited by setrlimit")

# The whole process can write 1,000 bytes to a file, and hears of more as it hears of a full disk.
PROGRAM = """
import faulthandler, json, resource, shutil, warnings
import numpy as np
from mindspore import dataset, nn
from mindspore.train import Model
from ms_lossscale import DynamicLossScale, LossScaleMonitor, ScaledTrainOneStepCell

faulthandler.dump_traceback_later(100, exit=True)
net = nn.Dense(4, 1, weight_init="zeros")
optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
cell = ScaledTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, DynamicLossScale(2.0**10))
told = []

def train(steps, monitor, value=1.0):
    data = np.full((steps, 4), value, np.float32), np.ones((steps, 1), np.float32)
    Model(cell).train(1, dataset.NumpySlicesDataset(data).batch(1), callbacks=[monitor], dataset_sink_mode=False)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def tell(message, *_, **__):
    told.append([cell.counters()["applied_steps"], str(message)])

limit(1000)
warnings.showwarning = tell
monitor = LossScaleMonitor(2, csv="steps.csv")
train(20, monitor)
shutil.copy("steps.csv", "full.csv")
# More than fits into a buffer.
train(100, LossScaleMonitor(1000, summary_dir="summary"))
limit(100)
try:
    train(1, LossScaleMonitor(max_consecutive_skips=1, save_batch="batch.npz"), np.inf)
except RuntimeError as error:
    told.append([cell.counters()["applied_steps"], str(error)])
limit(resource.RLIM_INFINITY)
train(3, monitor)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The folder of a process that trained on a full disk, and what it told: applied steps before, and a message."""
    folder = tmp_path_factory.mktemp("full")
    return folder, json.loads(check_python("-c", PROGRAM, cwd=folder).splitlines()[-1])


@pytest.mark.slow
def test_each_file_is_named_once_while_the_training_runs(told):
    of_csv, of_summary, of_batch = told[1]
    # Not at the end, but when the rows of two more steps no longer fit.
    assert 12 <= of_csv[0] < 20
    assert "the argument 'csv' is 'steps.csv', which can't be written: File too large (errno 27)" in of_csv[1]
    assert of_summary[0] == 20 + 100
    assert "the argument 'summary_dir' is 'summary', which can't be written: File too large" in of_summary[1]
    assert of_batch[0] == 20 + 100
    assert "training was stopped at step 1: the last step was skipped" in of_batch[1]
    assert "The batch could not be saved: 'batch.npz' can't be written: File too large (errno 27)." in of_batch[1]


@pytest.mark.slow
def test_the_csv_file_holds_whole_rows_and_is_continued(told):
    with open(told[0] / "steps.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == [*range(1, len(steps) - 2), 1, 2, 3]
    full = (told[0] / "full.csv").read_bytes()
    assert full.count(b"\n") == 1 + len(steps) - 3 and full.endswith(b"\n")
    assert 12 <= len(steps) - 3 < 20
    assert all(row["retries"] == "0" for row in rows)
    assert [int(row["applied_steps"]) for row in rows[-3:]] == [121, 122, 123]


def test_a_row_that_was_written_in_part_is_cut_off(tmp_path):
    path = tmp_path / "steps.csv"
    file = CsvFile(path, ("step", "loss"))
    file.begin()
    file.append([(1, 0.5)])
    with open(path, "ab") as killed:
        killed.write(b"2,0.")
    file.begin()
    file.append([(1, 0.25)])
    assert path.read_bytes() == b"step,loss\r\n1,0.5\r\n1,0.25\r\n"


def test_rows_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "steps.csv"
    file = CsvFile(path, ("step", "loss"))
    file.begin()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.warns(RuntimeWarning, match="File too large"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (22, limits[1]))
        try:
            file.append([(1, 0.5), (2, 0.25), (3, 0.125)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"step,loss\r\n1,0.5\r\n"
