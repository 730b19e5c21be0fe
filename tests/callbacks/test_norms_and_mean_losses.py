"""What a monitor shows and keeps of norms and mean losses. The configurations compare its records with those wanted."""

import csv
import os
import warnings
from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Tensor, nn
from support.networks import BATCH, LossOfShape, batch_for
from support.sloped_networks import Slopes, manual, with_norm
from support.token_networks import Tokens, batch, tensors
from support.training import Recording, by_sgd

from ms_lossscale import DynamicLossScale, LossScaleMonitor

STEPS = 2
INF, CYCLE = float("inf"), {"gradient_accumulation_steps": STEPS}


def rows_of(path):
    return list(csv.DictReader(Path(path).read_text().splitlines()))


@quick_in_pynative_mode
def test_the_line_shows_norm_and_mean_where_there_are_any(mode, capsys):
    cell = by_sgd(Tokens(), DynamicLossScale(2.0**10), weighted=True, clip_norm=INF, **CYCLE)
    monitor, losses, counts = LossScaleMonitor(every_n_steps=1, csv="steps.csv"), [], (3, 6, 1)
    with monitor.watching(cell):
        for seed, count in enumerate(counts):
            outputs = cell(*tensors(batch(count, seed)))
            losses.append(float(outputs[0]))
            monitor.after_step(*outputs)
    norm, mean = cell.grad_norm(), np.average(losses[:2], weights=counts[:2])
    of_cycle = f"mean of the last cycle {mean:.6g}, gradient norm {norm:.6g}, "
    lines = capsys.readouterr().out.splitlines()
    assert [of_cycle in line for line in lines] == [False, True, True]
    assert "norm" not in lines[0] and "mean" not in lines[0]
    rows = rows_of("steps.csv")
    assert [row["grad_norm"] for row in rows] == ["", str(norm), ""]
    assert [row["step_loss"] for row in rows] == ["", str(float(rows[1]["step_loss"])), ""]
    np.testing.assert_allclose(float(rows[1]["step_loss"]), mean, rtol=1e-6)
    assert [row["dropped_calls"] for row in rows] == ["0", "0", "0"]


@quick_in_pynative_mode
def test_the_mean_of_a_cycle_with_an_infinite_weight_is_not_finite(mode):
    """Without a warning: the cycle is skipped."""
    cell = by_sgd(Tokens(), DynamicLossScale(2.0**10), weighted=True, **CYCLE)
    monitor, means = LossScaleMonitor(every_n_steps=100), []
    monitor.on_record = lambda record: means.append(record.step_loss)
    with warnings.catch_warnings(), monitor.watching(cell):
        warnings.simplefilter("error")
        for factor in (1, 1, 1, INF, INF, 1):
            x, y, mask = batch(3)
            monitor.after_step(*cell(*tensors((x, y, np.where(mask > 0, np.float32(factor), mask)))))
    assert [mean is not None and bool(np.isfinite(mean)) for mean in means] == [False, True, False, False, False, False]
    assert [mean is None for mean in means] == [True, False] * 3


@quick_in_pynative_mode
@pytest.mark.parametrize("clips, row, shown", [([INF, INF], "4.0/4.0", "4/4"), ([None, INF], "/4.0", "-/4")])
def test_two_norms_in_a_row_and_in_a_line(mode, clips, row, shown, capsys):
    cell = by_sgd([Slopes("a"), Slopes("b")], DynamicLossScale(2.0**10), kind="simultaneous", clip_norm=clips)
    monitor = LossScaleMonitor(every_n_steps=1, csv="steps.csv")
    with monitor.watching(cell):
        monitor.after_step(*cell(with_norm(4.0)))
    (written,) = rows_of("steps.csv")
    assert (written["grad_norm"], written["step_loss"]) == (row, written["loss"])
    line = capsys.readouterr().out
    assert f", gradient norm {shown}, loss scale" in line and "mean" not in line


@quick_in_pynative_mode
def test_a_file_that_0_4_began_goes_on_with_its_twelve_columns(mode):
    header = (
        "step,network,loss,loss_scale,skipped,applied_steps,skipped_steps,consecutive_skipped_steps,next_loss_scale,"
        "overflowed_parameters,retries,skip_reasons"
    )
    before = f"{header}\r\n1,0,0.5,1024.0,0,1,0,0,1024.0,,0,\r\n".encode()
    Path("steps.csv").write_bytes(before)
    cell, monitor = by_sgd(Slopes(), DynamicLossScale(2.0**10), clip_norm=INF), LossScaleMonitor(csv="steps.csv")
    with monitor.watching(cell):
        for norm in (4.0, INF):
            monitor.after_step(*cell(with_norm(norm)))
    assert Path("steps.csv").read_bytes().startswith(before)
    rows = rows_of("steps.csv")
    assert [row["skip_reasons"] for row in rows] == ["", "", "loss"]
    assert all(len(row) == 12 and None not in row.values() for row in rows)


class Picture(nn.Cell):
    """Returns a loss and a picture of 4 MiB, or the picture as the loss."""

    def __init__(self, has_aux):
        super().__init__()
        self.weight = mindspore.Parameter(Tensor(np.ones(4, np.float32)), name="weight")
        self.picture = Tensor(np.ones((1024, 1024), np.float32))
        self.has_aux = has_aux

    def construct(self, x):
        loss = (self.weight * x).sum()
        return (loss, self.picture * loss) if self.has_aux else self.picture * loss


def mebibytes_in_use():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("has_aux", [True, False])
def test_of_99_unread_steps_no_picture_is_kept(mode, has_aux):
    x = Tensor(np.ones(4, np.float32))
    cell = by_sgd(Picture(has_aux), DynamicLossScale(), 1e-6, has_aux=has_aux)
    monitor = LossScaleMonitor(every_n_steps=100)
    with monitor.watching(cell):
        for step in range(99):
            monitor.after_step(*cell(x))
            if step == 9:
                before = mebibytes_in_use()
        # The pictures of 89 steps are 356 MiB.
        assert mebibytes_in_use() - before < 100


@quick_in_pynative_mode
def test_of_a_loss_that_is_no_scalar_it_is_the_sum(mode):
    monitor = Recording()
    cell = by_sgd(LossOfShape((BATCH, 1)), DynamicLossScale(), **CYCLE)
    sums = []
    with monitor.watching(cell):
        for seed in range(STEPS):
            outputs = cell(*batch_for(False, seed))
            monitor.after_step(*outputs)
            sums.append(outputs[0].asnumpy().sum())
    assert [record.loss for record in monitor.records] == pytest.approx(sums)
    assert monitor.records[-1].step_loss == pytest.approx(np.mean(sums))


@pytest.mark.parametrize("steps", [1, STEPS])
def test_an_end_without_begin_has_no_norm_and_no_mean_and_is_in_no_cycle(mode, steps, capsys):
    step, train_step = manual(DynamicLossScale(2.0**10), "in_jit", clip_norm=INF, gradient_accumulation_steps=steps)
    monitor, losses = Recording(), []

    @mindspore.jit
    def end_alone(*grads):
        return step.end(grads, loss=grads[0].sum())

    with monitor.watching(step):
        # The last step that is skipped before it has other reasons, and names.
        for norm in [INF] * steps + [4.0, None, 8.0]:
            if norm is None:
                monitor.after_step(100.0, end_alone(with_norm(2.0)))
            else:
                loss, overflow = train_step(with_norm(norm))
                losses.append(float(loss))
                monitor.after_step(loss, overflow)
    *_, first, without_begin, last = monitor.records
    assert (without_begin.skipped, without_begin.skip_reasons) == (1, "not_begun")
    assert without_begin.overflowed_parameters == ""
    assert (without_begin.grad_norm, without_begin.step_loss) == (None, None)
    assert without_begin.next_loss_scale == without_begin.loss_scale
    assert last.grad_norm == ((8.0,) if steps == 1 else (6.0,))
    assert last.step_loss == pytest.approx(np.mean(losses[-steps:]))
    assert (first.step_loss is None) == (steps > 1)
    lines = capsys.readouterr().out.splitlines()
    what = f"{'step' if steps == 1 else 'call'} {len(monitor.records) - 1}: skipped ({steps} in a row)"
    assert f"{what} as 'end' came without 'begin', loss scale 512 stays" in lines
    assert lines[-1].endswith("1 as 'end' came without 'begin'")
