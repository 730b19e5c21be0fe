"""What LossScaleMonitor says and writes of the reason why a step was skipped, and what a picture shows of it."""

import csv
import warnings

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, ops
from support.bad_batches import bad, bad_state, good, pair, patient, steep, trained
from support.retried_networks import Slope, inputs
from support.sloped_networks import cell, manual, with_norm

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    FixedLossScale,
    LossScaleMonitor,
    NormSpike,
    OverflowDetector,
    SimultaneousTrainOneStepCell,
)
from ms_lossscale.callbacks import files

SPIKE = with_norm(64.0)


def spiky(loss_scale=None, **keywords):
    return cell(loss_scale or DynamicLossScale(2.0**10), skip_conditions=[NormSpike(max_norm=10.0)], **keywords)


def watch(its, batches, monitor, flush=False):
    """Makes these steps, and passes them to the monitor."""
    with monitor.watching(its):
        for batch in batches:
            batch = batch if isinstance(batch, tuple) else (batch,)
            monitor.after_step(*its(*batch), inputs=batch)
        if flush:
            its.flush()
            monitor.after_epoch()


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def rows(path="steps.csv"):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# Lines.


def test_a_spike_is_no_overflow(mode, capsys):
    watch(spiky(), map(with_norm, (4.0, 64.0, 64.0, np.inf)), LossScaleMonitor(100))
    assert lines(capsys) == [
        "step 2: skipped by a condition: NormSpike(max_norm=10.0) (1 in a row), loss scale 1024 stays",
        "step 3: skipped by a condition: NormSpike(max_norm=10.0) (2 in a row), loss scale 1024 stays",
        "step 4: overflow at loss scale 1024, skipped (3 in a row), now 512; not finite: slopes.weight (1 of 1 "
        "gradients)",
        "steps 1 to 4: 3 skipped: 2 by a condition, 1 with a loss that was not finite",
    ]


@quick_in_pynative_mode
@pytest.mark.parametrize(
    ("loss_scale", "stays"),
    [(None, "loss scale 1 stays"), (FixedLossScale(8.0, drop_overflow_update=False), "loss scale 8 stays")],
    ids=["none", "unchecked"],
)
def test_a_spike_without_a_check(mode, loss_scale, stays, capsys):
    conditions = [NormSpike(max_norm=10.0, z_score=3.5), NormSpike(z_score=2.0, window=7)]
    watch(cell(loss_scale, skip_conditions=conditions), map(with_norm, (64.0, np.inf)), LossScaleMonitor(100))
    of = "NormSpike(max_norm=10.0, z_score=3.5, window=100) or NormSpike(z_score=2.0, window=7)"
    assert lines(capsys)[:2] == [
        f"step 1: skipped by a condition: {of} (1 in a row), {stays}",
        f"step 2: skipped by a condition: {of} (2 in a row), {stays}; not finite: slopes.weight (1 of 1 gradients)",
    ]


def test_a_loss_that_no_scale_mends(mode, capsys):
    its = trained(patient())
    watch(its, [good(), bad(), steep(), bad()], LossScaleMonitor(100))
    not_finite = "not finite: slope.weight (1 of 1 gradients)"
    assert lines(capsys) == [
        f"step 2: the loss was not finite, skipped (1 in a row), loss scale 4096 stays; {not_finite}",
        f"step 3: overflow at loss scale 4096, skipped (2 in a row), now 2048; {not_finite}",
        f"step 4: the loss was not finite, skipped (3 in a row), loss scale 2048 stays; {not_finite}",
        "steps 1 to 4: 3 skipped: 2 with a loss that was not finite, 1 with gradients that were not finite",
    ]


class StateOnly(Slope):
    """Its loss does not see its first input."""

    def construct(self, x, slope):
        return ops.depend((self.weight * slope).sum(), self.norm(x))


@quick_in_graph_mode
@pytest.mark.parametrize("is_patient", [False, True])
def test_what_only_the_forward_wrote(mode, is_patient, capsys):
    its = trained(patient() if is_patient else DynamicLossScale(2.0**12), StateOnly())
    watch(its, [bad_state()], LossScaleMonitor(100))
    what = "overflow at loss scale 4096, skipped (1 in a row), now 2048"
    if is_patient:
        what = "what the forward wrote was not finite, skipped (1 in a row), loss scale 4096 stays"
    assert lines(capsys) == [
        f"step 1: {what}; all gradients are finite, but not what the forward wrote (see forward_state_names())",
        "step 1: 1 skipped: 1 as what the forward wrote was not finite",
    ]


class Suspicious(OverflowDetector):
    def start(self, inputs):
        return inputs

    def construct(self, grads):
        return Tensor(True)


@quick_in_pynative_mode
def test_a_detector_of_ones_own(mode, capsys):
    its = cell(DynamicLossScale(2.0**10), overflow_detector=Suspicious())
    watch(its, [with_norm(1.0)], LossScaleMonitor(100))
    assert lines(capsys) == [
        "step 1: overflow at loss scale 1024, skipped (1 in a row), now 512; all gradients are finite; Suspicious told "
        "of the overflow",
        "step 1: 1 skipped: 1 by the overflow detector alone",
    ]


@quick_in_graph_mode
def test_a_retry_that_a_condition_skips(mode, capsys):
    its = trained(DynamicLossScale(2.0**15), max_retries=8, skip_conditions=[NormSpike(max_norm=50.0)])
    watch(its, [inputs(63.0)], LossScaleMonitor(100))
    assert lines(capsys) == [
        "step 1: overflow at 32768, done again at 1024, then skipped by a condition: NormSpike(max_norm=50.0) (1 in a "
        "row), loss scale 1024 stays",
        "step 1: 1 skipped: 1 by a condition",
    ]


@quick_in_pynative_mode
def test_networks_and_cycles(mode, capsys):
    its = pair(AlternatingTrainOneStepCell, patient(), skip_conditions=[NormSpike(max_norm=10.0)])
    watch(its, [(*good(), *inputs(11.0)), (*bad(), *good())], LossScaleMonitor(100))
    assert lines(capsys) == [
        "step 1: skipped by a condition of network 1: NormSpike(max_norm=10.0) (1 in a row), loss scale 4096 stays",
        "step 2: the loss of network 0 was not finite, skipped (1 in a row), loss scale 4096 stays; not finite: "
        "a.weight (1 of 1 gradients)",
        "steps 1 to 2: network 0: 1 skipped: 1 with a loss that was not finite; network 1: 1 skipped: 1 by a condition",
    ]
    watch(spiky(gradient_accumulation_steps=2), map(with_norm, (12.0, 4.0, 12.0, 12.0)), LossScaleMonitor(100))
    watch(spiky(gradient_accumulation_steps=2), [with_norm(12.0)], LossScaleMonitor(100), flush=True)
    by = "cycle skipped by a condition: NormSpike(max_norm=10.0) (1 in a row), loss scale 1024 stays"
    assert lines(capsys) == [
        f"call 4: {by}",
        "calls 1 to 4: 1 cycle skipped: 1 by a condition",
        f"call 1: {by}",
        "call 1: 1 cycle skipped: 1 by a condition",
    ]


@quick_in_pynative_mode
def test_scales_of_their_own(mode, capsys):
    """One stays and the other falls: that is an overflow."""
    its = pair(SimultaneousTrainOneStepCell, [patient(), patient()], [StateOnly("a"), Slope("b")])
    watch(its, [(*bad(), *steep()), (*bad(), *good())], LossScaleMonitor(100, csv="steps.csv"))
    told = lines(capsys)
    assert told[0].startswith("step 1: overflow at loss scale 4096/4096, skipped (1 in a row), now 4096/2048; ")
    assert told[1].startswith("step 2: the loss was not finite, skipped (2 in a row), loss scale 4096/2048 stays; ")
    assert [row["skip_reasons"] for row in rows()] == ["loss", "loss"]


@quick_in_pynative_mode
def test_each_epoch_has_a_sum_of_its_own(mode, capsys):
    its, monitor = spiky(), LossScaleMonitor(100)
    with monitor.watching(its):
        for norms in ((64.0, 4.0), (4.0, 4.0), (4.0, np.inf)):
            for norm in norms:
                monitor.after_step(*its(with_norm(norm)))
            monitor.after_epoch()
    assert [line for line in lines(capsys) if "skipped: " in line] == [
        "steps 1 to 2: 1 skipped: 1 by a condition",
        "steps 5 to 6: 1 skipped: 1 with a loss that was not finite",
    ]


# What it costs.


@quick_in_pynative_mode
def test_only_skipped_steps_are_read_for_their_reason(mode, monkeypatch):
    read, asnumpy = [], Tensor.asnumpy
    monkeypatch.setattr(Tensor, "asnumpy", lambda tensor: (read.append(tensor.shape), asnumpy(tensor))[1])

    def reads(norms):
        its, monitor = spiky(), LossScaleMonitor(100, max_consecutive_skips=9)
        counts = []
        with monitor.watching(its):
            for norm in norms:
                outputs = its(with_norm(norm))
                read.clear()
                monitor.after_step(*outputs)
                counts.append(len(read))
        return counts

    first, clean, skipped = reads((4.0, 4.0, 64.0))
    # The loss, the overflow, the scale, three counts twice and the next scale, as ever.
    assert first == clean == 10
    # The reasons, and which gradients were not finite.
    assert skipped == clean + 2


# The file.

EARLIER = (
    "step,network,loss,loss_scale,skipped,applied_steps,skipped_steps,consecutive_skipped_steps,next_loss_scale,"
    "overflowed_parameters,retries\r\n"
)


def test_the_column_tells_the_reason(mode):
    its = spiky(patient())
    watch(its, map(with_norm, (4.0, 64.0, np.nan)), LossScaleMonitor(100, csv="steps.csv"))
    assert [row["skip_reasons"] for row in rows()] == ["", "condition", "loss"]
    assert list(rows()[0])[-1] == "skip_reasons"


@quick_in_pynative_mode
@pytest.mark.parametrize("rest", ["", "3,0,0.5,10"], ids=["whole", "killed"])
def test_a_file_of_an_earlier_version_is_continued(mode, rest, tmp_path):
    path = tmp_path / "steps.csv"
    path.write_bytes(
        (EARLIER + '1,0,0.5,1024.0,0,1,0,0,1024.0,,0\r\n2,0,inf,1024.0,1,1,1,1,512.0,"a,b",0\r\n' + rest).encode()
    )
    path.chmod(0o640)
    link = tmp_path / "link.csv"
    link.symlink_to(path)
    watch(spiky(), [SPIKE], LossScaleMonitor(csv=link))
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    written = rows(path)
    assert [(row["step"], row["retries"], row["skip_reasons"]) for row in written] == [
        ("1", "0", ""),
        ("2", "0", ""),
        ("1", "0", "condition"),
    ]
    assert written[1]["overflowed_parameters"] == "a,b"
    assert None not in written[0]
    # Once only.
    before = path.read_bytes()
    watch(spiky(), [SPIKE], LossScaleMonitor(csv=path))
    assert path.read_bytes().startswith(before) and len(rows(path)) == 4


@quick_in_pynative_mode
def test_a_file_of_an_earlier_version_that_can_not_be_rewritten(mode, tmp_path, monkeypatch):
    path = tmp_path / "steps.csv"
    path.write_bytes(EARLIER.encode())

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fails)
    with pytest.warns(RuntimeWarning, match=r"'csv' is '.*steps\.csv', which can't be written: No space left"):
        watch(spiky(), [SPIKE], LossScaleMonitor(csv=path))
    assert path.read_bytes() == EARLIER.encode()
    assert [each.name for each in tmp_path.glob("steps*")] == ["steps.csv"]


# Stopping, and the floor.


@quick_in_pynative_mode
@pytest.mark.parametrize("of", ["cell", *slow("manual")])
def test_it_says_that_conditions_stopped_the_training(mode, of, tmp_path):
    if of == "cell":
        its, call = [spiky()] * 2
    else:
        its, call = manual(DynamicLossScale(2.0**10), skip_conditions=[NormSpike(max_norm=10.0)])
    monitor = LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz")
    with pytest.raises(RuntimeError) as stopped, monitor.watching(its):
        for _ in range(2):
            monitor.after_step(*call(SPIKE), inputs=SPIKE)
    message = str(stopped.value)
    assert (
        "since step 1 all were skipped, and in the last 2 skips all gradients were finite; the loss was finite; a "
        "condition asked for all of them: NormSpike(max_norm=10.0). What to try: nothing overflows, so leave the loss "
        "scale as it is, and look at the condition and its threshold."
    ) in message
    assert "locate_overflow" not in message and "min_loss_scale" not in message
    what = "network, " if of == "cell" else "forward, step.parameters, "
    assert message.endswith(
        f"The batch was saved: profile_gradients({what}[tuple(np.load('batch.npz').values())]) shows its gradients."
    )


@quick_in_pynative_mode
def test_it_says_so_of_a_part_of_them(mode):
    with pytest.raises(RuntimeError) as stopped:
        watch(spiky(), [SPIKE, with_norm(np.inf), SPIKE], LossScaleMonitor(max_consecutive_skips=3))
    assert (
        "the gradients of slopes.weight (1) were not finite; the loss was not finite in 1 of them; a condition asked "
        "for 2 of them: NormSpike(max_norm=10.0). What to try: no loss scale fixes a loss that is not finite"
    ) in str(stopped.value)


@quick_in_pynative_mode
@pytest.mark.parametrize("what", ["condition", "loss", "gradients"])
def test_only_what_asks_for_a_lower_scale_warns_at_the_floor(mode, what):
    its = trained(patient(2.0**12, min_loss_scale=2.0**12), skip_conditions=[NormSpike(max_norm=10.0)])
    batch = {"condition": inputs(11.0), "loss": bad(), "gradients": steep()}[what]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch(its, [batch] * 2, LossScaleMonitor(1))
    told = [str(each.message) for each in caught if "stuck at its floor" in str(each.message)]
    assert len(told) == (what == "gradients")
