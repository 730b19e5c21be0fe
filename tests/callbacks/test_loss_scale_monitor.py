"""LossScaleMonitor: what it prints and writes, and when it stops, in Model.train and in loops of one's own."""

import contextlib
import csv
import resource
import warnings
from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import in_pairs, quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Tensor, dataset, nn, ops
from mindspore.train import Model
from support.linear_pair import Trained, arrays
from support.networks import BATCH, Linear, LinearWithBias, batch_for
from support.npu_networks import BACKWARD, OnNpu, inputs_for, optimizers_of
from support.retried_networks import LEARNING_RATE, Slope, inputs
from support.sloped_networks import cell, manual, with_norm
from support.training import Recording, by_sgd

import ms_lossscale as ls


def dataset_of(batches):
    """A dataset whose batches are these tuples of arrays."""
    columns = tuple(np.concatenate(column) for column in zip(*batches))
    return dataset.NumpySlicesDataset(columns, [f"x{i}" for i in range(len(columns))], shuffle=False).batch(BATCH)


def linear_batches(overflows):
    return [tuple(its.asnumpy() for its in batch_for(overflow, seed)) for seed, overflow in enumerate(overflows)]


def linear(loss_scale=None, network=None, **keywords):
    network = network or LinearWithBias()
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    return ls.ScaledTrainOneStepCell(
        network, optimizer, loss_scale or ls.DynamicLossScale(2.0**10), **keywords
    ).set_train()


def sloped(loss_scale, network=None, **keywords):
    return by_sgd(network or Slope(), loss_scale, LEARNING_RATE, **keywords)


def spiky(**keywords):
    return cell(ls.DynamicLossScale(2.0**10), skip_conditions=[ls.NormSpike(max_norm=10.0)], **keywords)


def patient(scale=2.0**12):
    return ls.DynamicLossScale(scale, backoff_if_loss_not_finite=False)


def train(its, batches, monitor, epochs=1, others=(), sink=False):
    Model(its).train(epochs, dataset_of(batches), callbacks=[monitor, *others], dataset_sink_mode=sink)


def watch(its, batches, monitor, call=None, flush=False, epochs=1):
    """Makes these steps in a loop, and passes them to the monitor."""
    with monitor.watching(its):
        for _ in range(epochs):
            for batch in batches:
                batch = tuple(map(Tensor, batch)) if isinstance(batch, tuple) else (batch,)
                monitor.after_step(*(call or its)(*batch), inputs=batch)
            if flush:
                its.flush()
            monitor.after_epoch()


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def rows(path="steps.csv"):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


OVERFLOW = "not finite: slope.weight (1 of 1 gradients)"
# Of Slope, 60 overflows above 2**10.
GOOD, STEEP, VERY_STEEP = inputs(1.0), inputs(60.0), inputs(2.0**12)
NAN = Tensor(np.full((4, 3), np.nan, np.float32)), Tensor(np.float32(np.nan))
INFINITE_STATE = Tensor(np.full((4, 3), np.inf, np.float32)), Tensor(np.float32(1.0))


class StateOnly(Slope):
    """Its loss does not see its first input, which BatchNorm's moving statistics see."""

    def construct(self, x, slope):
        return ops.depend((self.weight * slope).sum(), self.norm(x))


class Suspicious(ls.OverflowDetector):
    def start(self, inputs):
        return inputs

    def construct(self, grads):
        return Tensor(True)


def of_two(kind, loss_scale, **keywords):
    networks = [Slope("a"), Slope("b")]
    return by_sgd(networks, loss_scale, LEARNING_RATE, kind, network_inputs=[(0, 1), (2, 3)], **keywords)


class NoLongerNew(ls.SkipCondition):
    """Skips every step whose loss is above 1."""

    def construct(self, loss, norm):
        return loss > 1.0


LINES = {
    "one network, and a scale that stays": (
        lambda: sloped(patient()),
        [GOOD, STEEP, STEEP, GOOD, NAN],
        [
            f"step 2: skipped (1 in a row) with gradients that were not finite, loss scale 4096, now 2048; {OVERFLOW}",
            "step 2: loss 179.812, loss scale 4096, 1 applied, 1 skipped",
            f"step 3: skipped (2 in a row) with gradients that were not finite, loss scale 2048, now 1024; {OVERFLOW}",
            "step 4: loss 2.99707, loss scale 1024, 2 applied, 2 skipped",
            f"step 5: skipped (1 in a row) with a loss that was not finite, loss scale 1024 stays; {OVERFLOW}",
            "steps 1 to 5: 3 skipped: 1 with a loss that was not finite, 2 with gradients that were not finite",
        ],
    ),
    "conditions": (
        lambda: cell(ls.DynamicLossScale(2.0**10), skip_conditions=[ls.NormSpike(max_norm=10.0), NoLongerNew()]),
        [with_norm(64.0), with_norm(np.inf)],
        [
            "step 1: skipped (1 in a row) by the condition NormSpike or NoLongerNew, loss scale 1024 stays",
            "step 2: skipped (2 in a row) with a loss that was not finite, loss scale 1024, now 512; not finite: "
            "slopes.weight (1 of 1 gradients)",
            "step 2: loss nan, loss scale 1024, 0 applied, 2 skipped",
            "steps 1 to 2: 2 skipped: 1 by the condition NormSpike or NoLongerNew, 1 with a loss that was not finite",
        ],
    ),
    "retries": (
        lambda: sloped(ls.DynamicLossScale(2.0**15), max_retries=8, skip_conditions=[ls.NormSpike(max_norm=500.0)]),
        [STEEP, inputs(400.0)],
        [
            "step 1: overflow at 32768, done again at 1024",
            "step 2: overflow at 1024, done again at 128, skipped (1 in a row) by the condition NormSpike, loss scale "
            "128 stays",
            "step 2: loss 1129.5, loss scale 128, 1 applied, 1 skipped",
            "steps 1 to 2: 1 skipped: 1 by the condition NormSpike",
        ],
    ),
    "cycles": (
        lambda: sloped(ls.DynamicLossScale(2.0**12), gradient_accumulation_steps=2, max_retries=1),
        [VERY_STEEP, GOOD, GOOD, GOOD],
        [
            "call 1: overflow at 4096, and in 1 retry down to 2048",
            "call 2: cycle skipped (1 in a row) with gradients that were not finite, loss scale 2048, now 1024; "
            f"{OVERFLOW}",
            "call 2: loss 3, mean of the last cycle 6145.5, loss scale 2048, 0 cycles applied, 1 skipped",
            "call 4: loss 3, mean of the last cycle 3, loss scale 1024, 1 cycle applied, 1 skipped",
            "calls 1 to 4: 1 cycle skipped: 1 with gradients that were not finite",
        ],
    ),
    "cycles with dropped calls": (
        lambda: sloped(ls.DynamicLossScale(2.0**12), gradient_accumulation_steps=2, drop_overflowed_calls=True),
        [GOOD, VERY_STEEP, VERY_STEEP, VERY_STEEP],
        [
            "call 2: dropped (1 in all), loss scale 4096",
            "call 2: loss 12288, mean of the last cycle 3, loss scale 4096, 1 cycle applied, 0 skipped, 1 call dropped",
            "call 3: dropped (2 in all), loss scale 2048",
            "call 4: dropped (3 in all), loss scale 2048, cycle skipped (1 in a row) with gradients that were not "
            f"finite, loss scale 2048, now 1024; {OVERFLOW}",
            "call 4: loss 12276, loss scale 2048, 1 cycle applied, 1 skipped, 3 calls dropped",
            "calls 1 to 4: 1 cycle skipped: 1 with gradients that were not finite, and 3 calls dropped",
        ],
    ),
    "alternating networks": (
        lambda: of_two("alternating", patient(), skip_conditions=[ls.NormSpike(max_norm=200.0)]),
        [(*GOOD, *VERY_STEEP), (*NAN, *GOOD)],
        [
            "step 1: network 1: skipped (1 in a row) with gradients that were not finite, loss scale 4096, now 2048; "
            "not finite: b.weight (1 of 1 gradients)",
            "step 2: network 0: skipped (1 in a row) with a loss that was not finite, loss scale 4096 stays; not "
            "finite: a.weight (1 of 1 gradients)",
            "step 2: network 0: loss nan, loss scale 4096, 1 applied, 1 skipped; network 1: loss 3, loss scale 2048, "
            "1 applied, 1 skipped",
            "steps 1 to 2: network 0: 1 skipped: 1 with a loss that was not finite; network 1: 1 skipped: 1 with "
            "gradients that were not finite",
        ],
    ),
}


@quick_in_pynative_mode
@pytest.mark.parametrize("name", LINES)
def test_lines(mode, name, capsys):
    make, batches, expected = LINES[name]
    watch(make(), batches, ls.LossScaleMonitor(every_n_steps=2))
    assert lines(capsys) == expected


@quick_in_pynative_mode
def test_endless_skips_are_told_ever_more_seldom(mode, capsys):
    its, overflows = sloped(8.0), [True] * 21 + [False] + [True] * 6
    # The second series begins anew.
    watch(
        its,
        [NAN if overflow else GOOD for overflow in overflows],
        ls.LossScaleMonitor(every_n_steps=7, csv="steps.csv"),
    )
    told = [int(line.split("skipped (")[1].split(" ")[0]) for line in lines(capsys) if "skipped (" in line]
    assert told == [1, 2, 3, 5, 10, 20, 1, 2, 3, 5]
    assert [row["skipped"] for row in rows()] == [str(int(overflow)) for overflow in overflows]


@quick_in_pynative_mode
def test_sums_are_of_an_epoch_and_counts_of_all(mode, capsys):
    its, monitor = spiky(), ls.LossScaleMonitor(every_n_steps=2)
    for _ in range(2):
        watch(its, [with_norm(4.0), with_norm(64.0)], monitor, epochs=2)
    told = lines(capsys)
    sums = [f"steps {steps}: 1 skipped: 1 by the condition NormSpike" for steps in ("1 to 2", "3 to 4")] * 2
    assert [line for line in told if "skipped: " in line] == sums
    applied = [line.split("1024, ")[1] for line in told if "applied" in line]
    assert applied == [f"{i} applied, {i} skipped{' in all' if i > 2 else ''}" for i in range(1, 5)]


COLUMNS = (
    "step,network,loss,loss_scale,skipped,applied_steps,skipped_steps,consecutive_skipped_steps,next_loss_scale,"
    "overflowed_parameters,retries,skip_reasons,grad_norm,step_loss,dropped_calls"
)


@quick_in_graph_mode
@pytest.mark.parametrize("sink", [False, *slow(True)])
def test_the_rows_and_that_training_is_the_same_with_it(mode, sink, capsys):
    monitor, batches = Recording(2, csv="steps.csv", max_consecutive_skips=5), linear_batches([0, 1, 1, 0, 0])
    cells = [linear(), linear()]
    train(cells[0], batches, monitor, sink=sink)
    Model(cells[1]).train(1, dataset_of(batches), dataset_sink_mode=False)
    for one, other in zip(cells[0].get_parameters(), cells[1].get_parameters()):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
    written = rows()
    assert ",".join(written[0]) == COLUMNS
    records = [record._asdict().items() for record in monitor.records]
    assert [{name: "" if its is None else str(its) for name, its in each} for each in records] == written
    assert [row["loss"] for row in written[1:3]] == ["inf", "inf"]
    assert [row["step_loss"] for row in written] == [row["loss"] for row in written]
    # On CPU each step is seen in a data sink, too; on other devices the last one of each epoch.
    assert [",".join([row["step"], *list(row.values())[3:12]]) for row in written] == [
        "1,1024.0,0,1,0,0,1024.0,,0,",
        "2,1024.0,1,1,1,1,512.0,weight bias,0,loss",
        "3,512.0,1,1,2,2,256.0,weight bias,0,loss",
        "4,256.0,0,2,2,0,256.0,,0,",
        "5,256.0,0,3,2,0,256.0,,0,",
    ]
    assert "step 4: " in capsys.readouterr().out


@in_pairs
def test_rows_and_lines_of_loops_are_those_of_model(mode, how, capsys):
    batches = linear_batches([False, True, True, False, False])
    train(
        cell(ls.DynamicLossScale(2.0**10), Linear()),
        batches,
        ls.LossScaleMonitor(every_n_steps=2, csv="model.csv"),
        epochs=2,
    )
    printed = lines(capsys)
    its = cell(ls.DynamicLossScale(2.0**10), Linear())

    @mindspore.jit
    def in_compiled_code(x, y):
        return its(x, y)

    watch(
        its,
        batches,
        ls.LossScaleMonitor(every_n_steps=2, csv="loop.csv"),
        in_compiled_code if how == "in_jit" else its,
        epochs=2,
    )
    assert lines(capsys) == printed
    step, train_step = manual(ls.DynamicLossScale(2.0**10), how, Linear())
    watch(step, batches, ls.LossScaleMonitor(every_n_steps=2, csv="manual.csv"), train_step, epochs=2)
    assert lines(capsys) == printed
    assert len(printed) == (4 + 1) + (5 + 1)
    assert Path("model.csv").read_bytes() == Path("loop.csv").read_bytes() == Path("manual.csv").read_bytes()


@quick_in_pynative_mode
@pytest.mark.parametrize("flush_first", [*slow(True), False])
def test_a_flushed_cycle_is_of_its_epochs_last_step(mode, flush_first, capsys):
    its = cell(ls.DynamicLossScale(2.0**10), Linear(), gradient_accumulation_steps=2)
    monitor = ls.LossScaleMonitor(csv="steps.csv")
    callbacks = [ls.FlushAccumulation(), monitor] if flush_first else [monitor, ls.FlushAccumulation()]
    batches = dataset_of(linear_batches([False, False, True]))
    Model(its).train(2, batches, callbacks=callbacks, dataset_sink_mode=False)
    step, train_step = manual(ls.DynamicLossScale(2.0**10), network=Linear(), gradient_accumulation_steps=2)
    watch(step, linear_batches([False, False, True]), ls.LossScaleMonitor(csv="manual.csv"), train_step, True, epochs=2)
    # What is flushed after the monitor was called has a sum of its own.
    of_loop = ["call 3", "calls 1 to 3", "call 6", "calls 4 to 6"]
    of_model = of_loop if flush_first else ["call 3", "calls 3 to 3", "call 6", "calls 6 to 6"]
    assert [line.partition(": ")[0] for line in lines(capsys)] == of_model + of_loop
    assert rows("steps.csv") == rows("manual.csv")
    columns = ("step", "skipped", "applied_steps", "loss_scale")
    assert [" ".join(row[name] for name in columns) for row in rows()] == [
        *(f"{its} 1024.0" for its in ("1 0 0", "2 0 1", "3 0 1", "3 1 1")),
        *(f"{its} 512.0" for its in ("4 0 1", "5 0 2", "6 0 2", "6 1 2")),
    ]


@quick_in_pynative_mode
def test_an_interrupted_training_loses_no_row_and_the_next_continues_the_file(mode):
    its, batches = linear(), linear_batches([False, True, False])
    monitor = ls.LossScaleMonitor(csv="steps.csv")
    with pytest.raises(KeyboardInterrupt), monitor.watching(its):
        for batch in batches[:2]:
            monitor.after_step(*its(*map(Tensor, batch)))
        raise KeyboardInterrupt
    # One that is killed may leave a part of a line.
    with open("steps.csv", "a") as file:
        file.write("3,0,0.5,10")
    train(its, batches, ls.LossScaleMonitor(csv="steps.csv"), epochs=2)
    assert [row["step"] for row in rows()] == ["1", "2", "1", "2", "3", "4", "5", "6"]
    assert [row["skipped_steps"] for row in rows()] == ["0", "1", "1", "2", "2", "2", "3", "3"]


@quick_in_pynative_mode
def test_a_file_of_another_kind_is_refused(mode):
    for text in ("a,b\n1,2\n", '{"a": 1}'):
        Path("notes.csv").write_text(text)
        with pytest.raises(ValueError, match=r"'csv' is '.*notes\.csv', which has other columns than step, network, "):
            watch(spiky(), [], ls.LossScaleMonitor(csv="notes.csv"))
        assert Path("notes.csv").read_text() == text
    # A run that was killed left the beginning of a first line.
    Path("notes.csv").write_text("step,netw")
    watch(spiky(), [], ls.LossScaleMonitor(csv="notes.csv"))
    assert Path("notes.csv").read_text().startswith("step,network,loss,")


@quick_in_pynative_mode
def test_a_file_that_can_not_be_written_raises_and_what_was_written_can_be_read(mode):
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(OSError, match="File too large"):
            watch(
                cell(ls.DynamicLossScale()),
                [with_norm(4.0)] * 50,
                ls.LossScaleMonitor(every_n_steps=1, csv="steps.csv"),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert len(rows()) > 10
    ls.plot_scale("steps.csv")


@quick_in_graph_mode
def test_it_stops_a_training_that_only_skips(mode, tmp_path):
    its, path = linear(network=Linear()), str(tmp_path / "batch.npz")
    batches = linear_batches([False, True, False, True, True, True, False])
    with pytest.raises(RuntimeError) as stopped:
        train(its, batches, ls.LossScaleMonitor(csv="steps.csv", max_consecutive_skips=3, save_batch=path))
    assert str(stopped.value) == (
        "For 'LossScaleMonitor', training was stopped at step 6, since max_consecutive_skips is 3: skipped (3 in a "
        "row) with a loss that was not finite, loss scale 128, now 64; not finite: weight (1 of 1 gradients). What to "
        "try: no loss scale fixes a loss that is not finite: locate_overflow names the cell where it begins. The batch "
        "was saved: "
        f"tuple(np.load({path!r}).values())."
    )
    assert its.counters()["consecutive_skipped_steps"] == 3
    assert [row["step"] for row in rows()] == ["1", "2", "3", "4", "5", "6"]
    # What it says to do works.
    saved = tuple(np.load(path).values())
    for array, expected in zip(saved, batches[5]):
        np.testing.assert_array_equal(array, expected)
    assert ls.locate_overflow(its, [saved], loss_scale=128).note == "The batch itself holds values that are not finite."


class OfAnything(Linear):
    """Takes a tuple of Tensors of two shapes, in a dict, None and a string besides, as some networks do."""

    def construct(self, pair, masks, name, more):
        return super().construct(*pair) if masks is None and name == "train" and more["scale"] == 2 else None


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_a_batch_of_any_inputs_is_saved_and_the_diagnoses_load_it(mode):
    its = linear(network=OfAnything())
    pair = tuple(map(Tensor, linear_batches([True])[0]))
    inputs = (pair, None, "train", {"scale": 2, "ids": [Tensor(np.arange(3))]})
    monitor = ls.LossScaleMonitor(max_consecutive_skips=1, save_batch="batch.npz")
    with pytest.raises(RuntimeError) as stopped, monitor.watching(its):
        monitor.after_step(*its(*inputs), inputs=inputs)
    assert "max_consecutive_skips is 1: skipped (1 in a row) with a loss that was not finite" in str(stopped.value)
    assert str(stopped.value).endswith(" The batch was saved: locate_overflow(network, ['batch.npz']).")
    wanted = str(ls.locate_overflow(its, [inputs]))
    for batches in (["batch.npz"], [Path("batch.npz")], "batch.npz"):
        assert str(ls.locate_overflow(its, batches)) == wanted
    assert ls.advise_float32(its, "batch.npz").holds == ls.advise_float32(its, [inputs]).holds


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_a_batch_that_can_not_be_saved_does_not_hide_why_it_stops(mode):
    its = linear()
    monitor = ls.LossScaleMonitor(max_consecutive_skips=1, save_batch="batch.npz")
    with pytest.raises(RuntimeError) as stopped, monitor.watching(its):
        monitor.after_step(*its(*map(Tensor, linear_batches([True])[0])), inputs=(object(),))
    assert "max_consecutive_skips is 1" in str(stopped.value)
    assert " The batch could not be saved: " in str(stopped.value)


def on_npu():
    network = OnNpu("network")
    return ls.ScaledTrainOneStepCell(network, optimizers_of([network])[0], ls.DynamicLossScale(16.0)).set_train()


ADVICE = {
    "gradients": (lambda: sloped(ls.DynamicLossScale(2.0**24)), STEEP, "with gradients .* find_loss_scale"),
    "forward_state": (
        lambda: sloped(patient(), StateOnly()),
        INFINITE_STATE,
        r"as what the forward wrote was not finite, loss scale 4096 stays.* see forward_state_names\(\)",
    ),
    "condition": (spiky, with_norm(64.0), "by the condition NormSpike.* look at the condition and its threshold"),
    "detector": (
        lambda: cell(8.0, overflow_detector=Suspicious()),
        with_norm(1.0),
        "by the overflow detector alone.* look at your overflow detector",
    ),
    "register": (on_npu, tuple(inputs_for(BACKWARD)), "detector alone.* where an NPU's status register tells"),
}


@quick_in_pynative_mode
@pytest.mark.parametrize("reason", ADVICE)
def test_what_it_advises(mode, reason):
    make, batch, advice = ADVICE[reason]
    with ls.emulation.saturation_mode() if reason == "register" else contextlib.nullcontext():
        its = make()
        with pytest.raises(RuntimeError, match=f"{advice}.*The batch was saved"):
            watch(its, [batch] * 2, ls.LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.data"))
    assert its.skip_reasons()["detector" if reason == "register" else reason] == 2
    # In a file of the name that was asked for.
    np.testing.assert_array_equal(np.load("batch.data")["input_0"], (batch if type(batch) is tuple else (batch,))[0])


@quick_in_graph_mode
def test_flushed_cycles_stop_a_training_in_time_and_the_call_that_overflowed_is_saved(mode):
    its, batches = linear(gradient_accumulation_steps=3), linear_batches([False, True, False, False, True])
    monitor = ls.LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz")
    with pytest.raises(RuntimeError, match=r"at call 5, .*: cycle skipped \(2 in a row\)"):
        train(its, batches, monitor, others=[ls.FlushAccumulation()])
    assert its.counters()["skipped_steps"] == 2
    np.testing.assert_array_equal(np.load("batch.npz")["input_0"], batches[4][0])


def test_it_stops_for_one_of_alternating_networks():
    batches = [arrays(seed, (False, True)) for seed in range(6)]
    monitor = ls.LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz")
    with pytest.raises(RuntimeError, match=r"at step 4, .* network 1: skipped \(2 in a row\).*: second\.weight \(1"):
        train(Trained("alternating", every=(1, 2)).cell, batches, monitor)
    np.testing.assert_array_equal(np.load("batch.npz")["input_1"], batches[3][1])


@quick_in_pynative_mode
def test_skips_that_are_not_in_a_row_or_of_an_earlier_run_stop_nothing(mode):
    spike, monitor = with_norm(64.0), ls.LossScaleMonitor(max_consecutive_skips=2)
    its = spiky(gradient_accumulation_steps=2)
    watch(its, [spike, spike, with_norm(1.0), with_norm(1.0)] * 2, monitor)
    stops = ls.LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz")
    with pytest.raises(RuntimeError, match="The batch is not known: pass after_step inputs="), stops.watching(its):
        for _ in range(4):
            stops.after_step(*its(spike))
    # The first call of a cycle: nothing has been skipped anew.
    watch(its, [with_norm(1.0)] * 2, monitor)
    assert its.counters()["applied_steps"] == 3


@quick_in_pynative_mode
def test_arguments_by_position_work_once_more_with_a_warning(mode, capsys):
    with pytest.warns(
        FutureWarning, match=r"version 0\.5.* LossScaleMonitor\(every_n_steps=2, csv='steps.csv'\)"
    ) as told:
        monitor = ls.LossScaleMonitor(2, "steps.csv", max_consecutive_skips=3)
    assert [each.filename for each in told] == [__file__]
    watch(linear(), linear_batches([False] * 2), monitor)
    assert (len(rows()), len(lines(capsys))) == (2, 1)
    for call in (lambda: ls.LossScaleMonitor(1, None, 3, None, 5), lambda: ls.LossScaleMonitor(1, every_n_steps=2)):
        with pytest.raises(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            call()


@quick_in_pynative_mode
def test_what_can_not_be_watched_is_refused(mode):
    monitor = ls.LossScaleMonitor()
    stock = nn.TrainOneStepCell(Linear(), nn.SGD(Linear().trainable_params()))
    with pytest.raises(TypeError, match=r"'LossScaleMonitor', the training cell must be one of ms_lossscale.*, but"):
        train(stock, linear_batches([False]), monitor)
    with pytest.raises(RuntimeError, match=r"call 'after_step\(\)' within: with monitor.watching\(cell\)"):
        monitor.after_step(1.0, False)
