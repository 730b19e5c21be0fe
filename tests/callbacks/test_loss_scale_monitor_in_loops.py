"""LossScaleMonitor in hand-written loops: the same lines, rows and ends as in Model."""

import contextlib

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, nn
from support.event_files import scalars_for_mindinsight
from support.linear_pair import Trained, arrays
from support.networks import LinearWithBias
from test_loss_scale_monitor import linear_batches, lines, rows, scaled_cell, train

from ms_lossscale import DynamicLossScale, LossScaleMonitor, ManualStep


def manual(network=None, jit=False, **keywords):
    """A ManualStep, and a function that makes a step and returns its loss and overflow."""
    network = network or LinearWithBias()
    step = ManualStep(
        network, nn.Momentum(network.trainable_params(), 0.01, 0.9), DynamicLossScale(2.0**10), **keywords
    )

    def forward(x, y):
        loss = network(x, y)
        return step.scale(loss), loss

    value_and_grad = mindspore.value_and_grad(forward, None, step.parameters, has_aux=True)

    def train_step(x, y):
        x, y = step.begin(x, y)
        (_, loss), grads = value_and_grad(x, y)
        return loss, step.end(grads, loss=loss)

    return step, mindspore.jit(train_step) if jit else train_step


def in_loop(cell, call, batches, monitor, epochs=1, flush=False, inputs=True):
    with monitor.watching(cell):
        for _ in range(epochs):
            for batch in batches:
                batch = tuple(map(Tensor, batch))
                monitor.after_step(*call(*batch), inputs=batch if inputs else None)
            if flush:
                cell.flush()
            monitor.after_epoch()


def text(path):
    with open(path) as file:
        return file.read()


@pytest.mark.parametrize("jit", [False, *slow(True)], ids=["eager", "jit"])
def test_rows_lines_and_scalars_are_those_of_model(mode, jit, capsys, tmp_path):
    batches = linear_batches([False, True, True, False, False])
    keywords = {"clip_norm": 10.0}

    def monitor(name):
        return LossScaleMonitor(2, csv=f"{name}.csv", summary_dir=name)

    train(scaled_cell(LinearWithBias(), **keywords), batches, monitor("model"), epochs=2)
    printed = lines(capsys)
    cell = scaled_cell(LinearWithBias(), **keywords).set_train()

    @mindspore.jit
    def in_compiled_code(x, y):
        return cell(x, y)

    in_loop(cell, in_compiled_code if jit else cell, batches, monitor("loop"), epochs=2)
    assert lines(capsys) == printed
    in_loop(*manual(jit=jit, **keywords), batches, monitor("manual"), epochs=2)
    assert lines(capsys) == printed
    assert len(printed) == (4 + 1) + (5 + 1)
    assert text("model.csv") == text("loop.csv") == text("manual.csv")
    assert [row["skipped"] for row in rows("manual.csv")] == ["0", "1", "1", "0", "0"] * 2
    # As text, in which NaN is equal to itself.
    scalars = [str(scalars_for_mindinsight(tmp_path / name)) for name in ("model", "loop", "manual")]
    assert scalars[0].count("'grad_norm'") == 10
    assert scalars[1:] == scalars[:1] * 2


@pytest.mark.parametrize("kind", [*slow("simultaneous"), "alternating"])
def test_rows_of_several_networks_are_those_of_model(kind):
    batches = [arrays(seed, (seed in (1, 2), seed == 2)) for seed in range(5)]
    train(Trained(kind).cell, batches, LossScaleMonitor(csv="model.csv"))
    cell = Trained(kind).cell
    in_loop(cell, cell, batches, LossScaleMonitor(csv="loop.csv"))
    assert text("loop.csv") == text("model.csv")
    assert len(rows("loop.csv")) == (10 if kind == "alternating" else 5)


@quick_in_pynative_mode
def test_a_cycle_that_is_flushed_is_of_the_last_step(mode, capsys):
    step, train_step = manual(gradient_accumulation_steps=2)
    batches = linear_batches([False, False, True])
    in_loop(step, train_step, batches, LossScaleMonitor(csv="steps.csv"), epochs=2, flush=True)
    written = rows()
    assert [row["step"] for row in written] == ["1", "2", "3", "3", "4", "5", "6", "6"]
    assert [row["skipped"] for row in written] == ["0", "0", "0", "1", "0", "0", "0", "1"]
    assert [float(row["loss_scale"]) for row in written] == [1024.0] * 4 + [512.0] * 4
    assert [line.partition(" at loss")[0] for line in lines(capsys)] == [
        "call 3: overflow",
        "calls 1 to 3: 1 cycle skipped: 1 with a loss that was not finite",
        "call 6: overflow",
        "calls 4 to 6: 1 cycle skipped: 1 with a loss that was not finite",
    ]


@quick_in_pynative_mode
def test_the_last_cycle_is_read_at_the_end(mode):
    step, train_step = manual(gradient_accumulation_steps=2)
    with LossScaleMonitor(csv="steps.csv").watching(step):
        pass
    assert rows() == []
    monitor = LossScaleMonitor(csv="steps.csv")
    with monitor.watching(step):
        monitor.after_step(*train_step(*map(Tensor, linear_batches([True])[0])))
        step.flush()
    assert [(row["step"], row["skipped"]) for row in rows()] == [("1", "0"), ("1", "1")]


@quick_in_pynative_mode
@pytest.mark.parametrize("of", ["manual", *slow("cell")])
def test_it_stops_a_loop_that_only_skips(mode, of, tmp_path):
    step, call = manual() if of == "manual" else [scaled_cell(LinearWithBias()).set_train()] * 2
    batches = linear_batches([False, True, True, True, False])
    monitor = LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz", csv="steps.csv")
    with pytest.raises(RuntimeError, match=r"stopped at step 3: the last 2 steps were .* The batch was saved: "):
        in_loop(step, call, batches, monitor)
    np.testing.assert_array_equal(np.load("batch.npz")["input_0"], batches[2][0])
    assert len(rows()) == 3
    with pytest.raises(RuntimeError, match="could not be saved: pass it to after_step, with inputs="):
        in_loop(step, call, batches[1:3], monitor, inputs=False)


@quick_in_pynative_mode
def test_a_loop_that_fails_loses_no_row(mode):
    step, train_step = manual()
    monitor = LossScaleMonitor(csv="steps.csv", summary_dir="summary")
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt), monitor.watching(step):
            for batch in linear_batches([False, True]):
                monitor.after_step(*train_step(*map(Tensor, batch)))
            raise KeyboardInterrupt
    assert [row["step"] for row in rows()] == ["1", "2", "1", "2"]


@quick_in_pynative_mode
def test_numbers_and_later_changes_of_the_scale(mode):
    """The scale in a row is that of its step, even if it is read later."""
    step, train_step = manual()
    monitor = LossScaleMonitor(csv="steps.csv")
    with monitor.watching(step):
        for overflow in (True, True, False):
            loss, overflow = train_step(*map(Tensor, linear_batches([overflow])[0]))
            monitor.after_step(float(loss), bool(overflow))
        step.set_loss_scale(8.0)
    assert [float(row["loss_scale"]) for row in rows()] == [1024.0, 512.0, 256.0]
    assert [float(row["next_loss_scale"]) for row in rows()] == [512.0, 256.0, 256.0]


@quick_in_pynative_mode
def test_what_can_not_be_watched_is_refused(mode):
    step, train_step = manual()
    cell = scaled_cell(LinearWithBias()).set_train()
    alternating = Trained("alternating")
    monitor = LossScaleMonitor()
    batch = tuple(map(Tensor, linear_batches([False])[0]))
    with (
        pytest.raises(TypeError, match="'cell' must be a training cell of ms_lossscale or a ManualStep, but got"),
        monitor.watching(LinearWithBias()),
    ):
        pass
    for call in (monitor.after_epoch, lambda: monitor.after_step(1.0, False)):
        with pytest.raises(RuntimeError, match=r"is for a loop within 'watching\(\)', but there is none"):
            call()
    with monitor.watching(step):
        with pytest.raises(ValueError, match=r"two values, the loss and what 'end' returned, but got \(Tensor"):
            monitor.after_step(*cell(*batch))
        with pytest.raises(TypeError, match=r"'loss' must be a Tensor or a number, but got \("):
            monitor.after_step((1.0,), False)
    for watched, wanted, outputs in (
        (cell, 3, train_step(*batch)),
        (alternating.cell, 4, alternating.cell(*map(Tensor, arrays(0)))[:3]),
    ):
        message = f"must be all {wanted} Tensors that the {type(watched).__name__} returns, but got"
        with monitor.watching(watched), pytest.raises(ValueError, match=message):
            monitor.after_step(*outputs)
    with pytest.raises(RuntimeError, match="there is none"):
        monitor.after_epoch()
