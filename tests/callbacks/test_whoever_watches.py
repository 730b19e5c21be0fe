"""The record of a step says what the step did, whoever watched, from when on, and whatever was loaded or discarded."""

import re

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from support.linear_pair import Trained
from support.retried_networks import LEARNING_RATE, Slope, inputs
from support.sloped_networks import cell, manual, with_norm
from support.training import Recording, by_sgd, stepping

from ms_lossscale import DynamicLossScale, LossScaleMonitor

INF, CYCLE = float("inf"), {"gradient_accumulation_steps": 3}
DROPPING = {**CYCLE, "drop_overflowed_calls": True}
NEW = ("accumulation.sum_of_losses", "accumulation.missing_losses")


def scale():
    return DynamicLossScale(2.0**10)


def told(its, norms, monitor=None, call=None):
    """Watches calls with gradients of these norms, and functions without inputs in between. Returns the records and
    losses."""
    monitor, losses = monitor or Recording(1), []
    with monitor.watching(its):
        for norm in norms:
            if callable(norm):
                norm()
            else:
                outputs = (call or its)(with_norm(norm))
                losses.append(float(outputs[0]))
                monitor.after_step(*outputs)
    return monitor.records, losses


def checkpoint(its):
    mindspore.save_checkpoint(its, "cell.ckpt")
    return mindspore.load_checkpoint("cell.ckpt")


def of_0_5(parameters):  # What version 0.5 saved.
    return {name: value for name, value in parameters.items() if not name.endswith(NEW)}


LOADS = {
    "load_state_dict": lambda its, parameters: its.load_state_dict(parameters),
    "load_param_into_net": mindspore.load_param_into_net,
}


@quick_in_pynative_mode
def test_a_cycle_that_two_watch_one_after_the_other_and_one_that_begins_within_it(mode):
    its = cell(scale(), **CYCLE)
    first, losses = told(its, [1.0, 2.0])
    second, others = told(its, [3.0])
    assert [record.step_loss for record in first] == [None, None]
    assert second[-1].step_loss == pytest.approx(np.mean([*losses, *others]))
    unwatched = float(its(with_norm(4.0))[0])
    records, others = told(its, [5.0, 6.0])
    assert records[-1].step_loss == pytest.approx(np.mean([unwatched, *others]))


@quick_in_pynative_mode
@pytest.mark.parametrize("how", LOADS)
def test_of_what_0_5_saved_within_a_cycle_the_mean_is_unknown(mode, how):
    saved, its = cell(scale(), **CYCLE), cell(scale(), **CYCLE)
    told(saved, [1.0, 2.0])
    # Within a cycle of its own, of which nothing is left.
    told(its, [7.0])
    parameters = of_0_5(checkpoint(saved))
    assert len(parameters) == len(saved.parameters_dict()) - len(NEW)
    LOADS[how](its, parameters)
    records, losses = told(its, [3.0, 4.0, 5.0, 6.0])
    assert [record.step_loss for record in records] == [None, None, None, pytest.approx(np.mean(losses[1:]))]
    parameters = of_0_5(checkpoint(its))
    LOADS[how](its, parameters)
    records, losses = told(its, [3.0, 4.0, 5.0])
    assert records[-1].step_loss == pytest.approx(np.mean(losses))


@quick_in_pynative_mode
@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("loads_first", [False, *slow(True)])
def test_a_step_is_skipped_after_a_return_to_an_earlier_state(mode, how, loads_first, capsys):
    its, monitor = cell(scale()), Recording(1)
    its(with_norm(1.0))
    saved = checkpoint(its)
    with monitor.watching(its):
        for norm in (INF, INF, 1.0, INF):
            outputs = its(with_norm(norm))
            if loads_first:
                LOADS[how](its, dict(saved))
            monitor.after_step(*outputs)
            if not loads_first:
                LOADS[how](its, dict(saved))
    assert [(record.skipped, record.skip_reasons) for record in monitor.records] == [
        *[(1, "loss")] * 2,
        (0, ""),
        (1, "loss"),
    ]
    assert [record.overflowed_parameters for record in monitor.records] == ["slopes.weight"] * 2 + ["", "slopes.weight"]
    assert [record.step_loss is None for record in monitor.records] == [False] * 4
    lines = capsys.readouterr().out.splitlines()
    assert [line[:15] for line in lines if "skipped (" in line] == [f"step {i}: skipped" for i in (1, 2, 4)]
    assert lines[-1] == "steps 1 to 4: 3 skipped: 3 with a loss that was not finite"


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["cycle", *slow("alternating")])
def test_a_cycle_ends_after_a_return_to_an_earlier_state(mode, kind):
    keywords = {} if kind == "cycle" else {"steps": 2}
    trained = Trained("scaled" if kind == "cycle" else kind, **{"steps": 2, **keywords})
    its, monitor = trained.cell, Recording(1)
    saved = checkpoint(its)
    with monitor.watching(its):
        for overflow in (False, True):
            for seed in range(2):
                outputs = trained.call_cell(seed, (overflow, False))
                its.load_state_dict(dict(saved)) if seed else None
                monitor.after_step(*outputs)
    *_, last = [record for record in monitor.records if record.network == 0]
    assert [record.step_loss is None for record in monitor.records if record.network == 0] == [True, False] * 2
    assert (last.skipped, last.overflowed_parameters) == (1, "first.weight")


@quick_in_pynative_mode
def test_retries_after_a_return_to_an_earlier_state_and_after_a_scale_was_set(mode, capsys):
    its = by_sgd(Slope(), DynamicLossScale(2.0**13), LEARNING_RATE, max_retries=9)
    saved, monitor, steep = checkpoint(its), Recording(1), inputs(60.0)
    with monitor.watching(its):
        monitor.after_step(*its(*steep))
        its.load_state_dict(saved)
        monitor.after_step(*its(*steep))
        its.set_loss_scale(2.0**12)
        monitor.after_step(*its(*steep))
    assert [record.retries for record in monitor.records] == [3, 3, 2]
    lines = [line for line in capsys.readouterr().out.splitlines() if "overflow at" in line]
    assert [re.findall(r"at (\d+)", line) for line in lines] == [[str(at), "1024"] for at in (8192, 8192, 4096)]


@quick_in_pynative_mode
@pytest.mark.parametrize("how", ["eagerly", *slow("in_jit")])
def test_a_manual_step_knows_the_mean_if_it_is_told_each_loss(mode, how):
    step, train_step = manual(scale(), how, **CYCLE)
    without_loss = stepping(step, step.networks[0], how)
    records, losses = told(step, [1.0, 2.0, 3.0], call=train_step)
    assert [record.step_loss for record in records] == [None, None, pytest.approx(np.mean(losses))]
    unknown, _ = told(step, [1.0, 2.0, 3.0], call=without_loss)
    train_step(with_norm(1.0))
    partly, _ = told(step, [2.0, 3.0], call=without_loss)
    assert [record.step_loss for record in (*unknown, *partly)] == [None] * 5
    assert [record.applied_steps for record in (*unknown, *partly)] == [1, 1, 2, 2, 3]
    records, losses = told(step, [1.0, 2.0, 3.0], call=train_step)
    assert records[-1].step_loss == pytest.approx(np.mean(losses))


@quick_in_pynative_mode
def test_two_monitors_at_once_have_the_same_records(mode):
    its, monitors = cell(scale(), **DROPPING, clip_norm=INF), [Recording(1), Recording(1000)]
    with monitors[0].watching(its), monitors[1].watching(its):
        for norm in (1.0, INF, 2.0, INF, INF, INF):
            outputs = its(with_norm(norm))
            for monitor in monitors:
                monitor.after_step(*outputs)
    first, second = ([str(record) for record in monitor.records] for monitor in monitors)
    assert first == second
    assert "skipped=1" in first[-1]


@quick_in_pynative_mode
def test_a_loop_that_does_not_tell_of_skipped_steps(mode, capsys):
    its, monitor = cell(scale()), Recording(1)
    with monitor.watching(its):
        for norm in (1.0, INF, INF, 1.0):
            outputs = its(with_norm(norm))
            if not outputs[1]:
                monitor.after_step(*outputs)
    assert [(record.skipped, record.skip_reasons, record.skipped_steps) for record in monitor.records] == [
        (0, "", 0),
        (0, "", 2),
    ]
    assert capsys.readouterr().out.splitlines()[-1] == "steps 1 to 2: 2 skipped: 2 with a loss that was not finite"


def test_the_batch_that_overflowed_after_a_discard():
    its, monitor = cell(scale(), **CYCLE), LossScaleMonitor(max_consecutive_skips=1, save_batch="batch.npz")
    with pytest.raises(RuntimeError, match="batch was saved"), monitor.watching(its):
        for norm in (INF, None, -INF, 1.0, 1.0):
            if norm is None:
                its.discard()
            else:
                x = with_norm(norm)
                monitor.after_step(*its(x), inputs=x)
    assert np.load("batch.npz")["input_0"][0] == -INF
