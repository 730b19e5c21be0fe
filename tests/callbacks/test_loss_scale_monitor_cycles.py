"""LossScaleMonitor where FlushAccumulation ends cycles, and where a training skips without end."""

import re

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore.train import Model
from test_loss_scale_monitor import dataset_of, linear_batches, lines, rows, scaled_cell, train

from ms_lossscale import DynamicLossScale, FlushAccumulation, LossScaleMonitor

SKIPPED = "cycle skipped ({} in a row), now {}; not finite: weight (1 of 1 gradients)"


def train_with_flush(cell, batches, monitor, flush_first, epochs=1):
    callbacks = [FlushAccumulation(), monitor] if flush_first else [monitor, FlushAccumulation()]
    Model(cell).train(epochs, dataset_of(batches), callbacks=callbacks, dataset_sink_mode=False)


@pytest.fixture(params=[*slow(True), False], ids=["flush_first", "flush_last"])
def flush_first(request):
    """Whether FlushAccumulation comes before the monitor."""
    return request.param


@quick_in_graph_mode
def test_a_flushed_cycle_is_of_its_epochs_last_step(mode, flush_first, capsys):
    cell = scaled_cell(gradient_accumulation_steps=2)
    monitor = LossScaleMonitor(100, csv="steps.csv")
    train_with_flush(cell, linear_batches([False, False, True]), monitor, flush_first, epochs=2)
    assert cell.counters() == {"applied_steps": 2, "skipped_steps": 2, "consecutive_skipped_steps": 1}
    # The second epoch begins with a cycle that is applied.
    sums = "call{}: 1 cycle skipped: 1 with a loss that was not finite"
    assert lines(capsys) == [
        "call 3: overflow at loss scale 1024, " + SKIPPED.format(1, 512),
        # What is flushed after the monitor was called has a sum of its own.
        sums.format("s 1 to 3" if flush_first else " 3"),
        "call 6: overflow at loss scale 512, " + SKIPPED.format(1, 256),
        sums.format("s 4 to 6" if flush_first else " 6"),
    ]
    written = rows()
    assert [row["step"] for row in written] == ["1", "2", "3", "3", "4", "5", "6", "6"]
    assert [row["skipped"] for row in written] == ["0", "0", "0", "1", "0", "0", "0", "1"]
    assert [row["applied_steps"] for row in written] == ["0", "1", "1", "1", "1", "2", "2", "2"]
    assert [float(row["loss_scale"]) for row in written] == [1024.0] * 4 + [512.0] * 4
    assert [float(row["next_loss_scale"]) for row in written] == [1024.0] * 3 + [512.0] * 4 + [256.0]
    assert [row["overflowed_parameters"] for row in written if row["skipped"] == "1"] == ["weight", "weight"]


def test_a_flushed_cycle_that_is_applied_has_a_row(flush_first):
    cell = scaled_cell(gradient_accumulation_steps=2)
    train_with_flush(cell, linear_batches([False] * 3), LossScaleMonitor(csv="steps.csv"), flush_first)
    assert [(row["step"], row["applied_steps"]) for row in rows()] == [("1", "0"), ("2", "1"), ("3", "1"), ("3", "2")]


@quick_in_graph_mode
def test_flushed_cycles_stop_a_training_in_time(mode, flush_first):
    cell = scaled_cell(gradient_accumulation_steps=3)
    batches = linear_batches([False, True])
    monitor = LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz")
    with pytest.raises(RuntimeError, match=r"at call 4: the last 2 cycles were skipped .* 1024, 512; since call 2 all"):
        train_with_flush(cell, batches, monitor, flush_first, epochs=4)
    assert cell.counters()["skipped_steps"] == 2
    np.testing.assert_array_equal(np.load("batch.npz")["input_0"], batches[1][0])


@quick_in_graph_mode
def test_lines_tell_calls_from_cycles_and_this_training_from_all(mode, capsys):
    cell = scaled_cell(gradient_accumulation_steps=2)
    train(cell, linear_batches([False, False, True, True]), LossScaleMonitor(4))
    train(cell, linear_batches([False] * 4), LossScaleMonitor(4))
    told = [re.sub(r"loss \S+,", "loss L,", line, count=1) for line in lines(capsys)]
    assert told == [
        "call 4: overflow at loss scale 1024, " + SKIPPED.format(1, 512),
        "call 4: loss L, loss scale 1024, 1 cycle applied, 1 skipped",
        "calls 1 to 4: 1 cycle skipped: 1 with a loss that was not finite",
        "call 4: loss L, loss scale 512, 3 cycles applied, 1 skipped in all",
    ]


# A training that skips without end.


def in_a_row(capsys):
    """The number in a row that each line of a skipped step tells."""
    return [int(line.split("skipped (")[1].split(" ")[0]) for line in lines(capsys) if "skipped (" in line]


@pytest.mark.slow
@pytest.mark.parametrize("every_n_steps", [1, 7, 1000])
def test_endless_skips_are_told_ever_more_seldom(every_n_steps, capsys):
    cell = scaled_cell(loss_scale=DynamicLossScale(2.0**100, max_loss_scale=2.0**100))
    monitor = LossScaleMonitor(every_n_steps, csv="steps.csv")
    # The second series begins anew.
    train(cell, linear_batches([True] * 57 + [False] + [True] * 6), monitor)
    assert in_a_row(capsys) == [1, 2, 3, 5, 10, 20, 50, 1, 2, 3, 5]
    assert [row["skipped"] for row in rows()] == ["1"] * 57 + ["0"] + ["1"] * 6


def test_a_line_tells_how_many_there_were_since_the_last_one(capsys):
    cell = scaled_cell(loss_scale=DynamicLossScale(2.0**30, max_loss_scale=2.0**30))
    train(cell, linear_batches([True] * 10), LossScaleMonitor())
    told = [line.split("skipped ")[1].split(", now")[0] for line in lines(capsys)[:-1]]
    assert told == [
        "(1 in a row)",
        "(2 in a row)",
        "(3 in a row)",
        "(5 in a row, 2 since the last line)",
        "(10 in a row, 5 since the last line)",
    ]


@pytest.mark.slow
def test_a_training_that_goes_on_skipping_tells_so_at_once(capsys):
    cell = scaled_cell(loss_scale=DynamicLossScale(2.0**30, max_loss_scale=2.0**30))
    train(cell, linear_batches([True] * 3), LossScaleMonitor())
    lines(capsys)
    train(cell, linear_batches([True] * 8), LossScaleMonitor())
    assert in_a_row(capsys) == [4, 5, 10]
