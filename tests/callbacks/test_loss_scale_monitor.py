"""LossScaleMonitor: what it prints and writes, and when it warns or stops, in Model.train."""

import csv
import re
import warnings

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, dataset, nn
from mindspore import dtype as mstype
from mindspore.train import Callback, Model
from support.gan_networks import rows_of
from support.linear_pair import CELLS, Trained, arrays
from support.networks import BATCH, FEATURES, Linear, LinearWithBias, LossOfShape, Mlp, batch_for
from support.npu_networks import Saturating, saturating_batch

from ms_lossscale import DynamicLossScale, LossScaleMonitor, ScaledTrainOneStepCell, emulation, locate_overflow

COLUMNS = [
    "step",
    "network",
    "loss",
    "loss_scale",
    "skipped",
    "applied_steps",
    "skipped_steps",
    "consecutive_skipped_steps",
    "next_loss_scale",
    "overflowed_parameters",
    "retries",
    "skip_reasons",
]


def dataset_of(batches):
    """A dataset whose batches are these tuples of arrays."""
    columns = tuple(np.concatenate(column) for column in zip(*batches))
    return dataset.NumpySlicesDataset(columns, [f"x{i}" for i in range(len(columns))], shuffle=False).batch(BATCH)


def linear_batches(overflows):
    return rows_of(batch_for(overflow, seed) for seed, overflow in enumerate(overflows))


def scaled_cell(network=None, loss_scale=None, **keywords):
    network = network or Linear()
    loss_scale = loss_scale or DynamicLossScale(2.0**10)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    return ScaledTrainOneStepCell(network, optimizer, loss_scale, **keywords)


def train(cell, batches, monitor, epochs=1, others=(), sink=False):
    Model(cell).train(epochs, dataset_of(batches), callbacks=[monitor, *others], dataset_sink_mode=sink)


class Losses(Callback):
    """Keeps the losses that the cell returned."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_step_end(self, run_context):
        self.losses.append(run_context.original_args().net_outputs[0].asnumpy().sum())


class Failure(Callback):
    """Ends the training by an exception after a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == self.step:
            raise KeyboardInterrupt


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def rows(path="steps.csv"):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# Lines.


@quick_in_graph_mode
def test_the_lines_of_one_network(mode, capsys):
    losses = Losses()
    cell = scaled_cell(Mlp())
    train(cell, linear_batches([False, True, True, False, False]), LossScaleMonitor(2), others=[losses])
    # Of an infinite input tanh makes an ordinary value.
    names = "hidden.weight (1 of 4 gradients)"
    assert lines(capsys) == [
        f"step 2: overflow at loss scale 1024, skipped (1 in a row), now 512; not finite: {names}",
        f"step 2: loss {losses.losses[1]:.6g}, loss scale 1024, 1 applied, 1 skipped",
        f"step 3: overflow at loss scale 512, skipped (2 in a row), now 256; not finite: {names}",
        f"step 4: loss {losses.losses[3]:.6g}, loss scale 256, 2 applied, 2 skipped",
        "steps 1 to 5: 2 skipped: 2 with gradients that were not finite",
    ]


class Steep(nn.Cell):
    """Its gradient is the sum of a batch of float16 numbers."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(1, np.float32)), name="weight")

    def construct(self, x):
        return (self.weight.astype(mstype.float16) * x.astype(mstype.float16)).astype(mstype.float32).sum()


@quick_in_pynative_mode
def test_the_lines_of_retries(mode, capsys):
    cell = scaled_cell(Steep(), DynamicLossScale(2.0**15), max_retries=2)
    # These overflow from 2**14 on, and at all scales here.
    batches = [(np.full((BATCH, 1), size / BATCH, np.float32),) for size in (6.0, 400.0)]
    train(cell, batches, LossScaleMonitor(100))
    assert lines(capsys) == [
        "step 1: overflow at 32768, done again at 8192",
        "step 2: overflow at loss scale 8192 and in 2 retries down to 2048, skipped (1 in a row), now 4096, since the "
        "first attempt counts; not finite: weight (1 of 1 gradients)",
        "steps 1 to 2: 1 skipped: 1 with gradients that were not finite",
    ]


@quick_in_graph_mode
def test_the_lines_of_alternating_networks(mode, capsys):
    trained = Trained("alternating")
    train(trained.cell, [arrays(0, (True, False)), arrays(1, (True, True))], LossScaleMonitor(2))
    printed = lines(capsys)
    assert printed[:3] == [
        "step 1: overflow of network 0 at loss scale 1024, skipped (1 in a row), now 512; not finite: first.weight "
        "(1 of 1 gradients)",
        "step 2: overflow of network 0 at loss scale 512, skipped (2 in a row), now 256; not finite: first.weight "
        "(1 of 1 gradients)",
        "step 2: overflow of network 1 at loss scale 1024, skipped (1 in a row), now 512; not finite: second.weight "
        "(1 of 1 gradients)",
    ]
    number = r"(nan|inf|[\d.]+)"
    assert re.fullmatch(
        f"step 2: network 0: loss {number}, loss scale 512, 0 applied, 2 skipped; "
        f"network 1: loss {number}, loss scale 1024, 1 applied, 1 skipped",
        printed[3],
    )
    assert printed[4:] == [
        "steps 1 to 2: network 0: 2 skipped: 2 with a loss that was not finite; network 1: 1 skipped: 1 with a loss "
        "that was not finite"
    ]


@pytest.mark.slow
def test_many_parameters_are_abridged(capsys):
    class Many(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layers = nn.SequentialCell([nn.Dense(FEATURES, FEATURES, has_bias=False) for _ in range(7)])

        def construct(self, x, y):
            return (self.layers(x) - y).mean()

    train(scaled_cell(Many()), linear_batches([True]), LossScaleMonitor())
    names = ", ".join(f"layers.{i}.weight" for i in range(5))
    assert lines(capsys)[0].endswith(f"not finite: {names}, ... (7 of 7 gradients)")


@pytest.mark.slow
def test_the_register_is_named_if_it_told(mode, capsys):
    with emulation.saturation_mode():
        cell = scaled_cell(Saturating("only"))
        train(cell, rows_of([saturating_batch(True, 0)]), LossScaleMonitor())
    assert lines(capsys) == [
        "step 1: overflow at loss scale 1024, skipped (1 in a row), now 512; all gradients are finite; the status "
        "register told of the overflow",
        "step 1: 1 skipped: 1 by the overflow detector alone",
    ]


# The CSV file.


@quick_in_graph_mode
@pytest.mark.parametrize("every_n_steps", [2, *slow(1, 100)])
def test_the_rows(mode, every_n_steps):
    losses = Losses()
    cell = scaled_cell(LinearWithBias())
    overflows = [False, True, True, False, False]
    train(cell, linear_batches(overflows), LossScaleMonitor(every_n_steps, csv="steps.csv"), others=[losses])
    written = rows()
    assert list(written[0]) == COLUMNS
    expected = [
        # Step, scale, skipped, applied and skipped so far, in a row, next scale.
        (1, 1024, 0, 1, 0, 0, 1024),
        (2, 1024, 1, 1, 1, 1, 512),
        (3, 512, 1, 1, 2, 2, 256),
        (4, 256, 0, 2, 2, 0, 256),
        (5, 256, 0, 3, 2, 0, 256),
    ]
    for row, values, loss, overflow in zip(written, expected, losses.losses, overflows):
        assert tuple(float(row[name]) for name in [COLUMNS[0], *COLUMNS[3:9]]) == values
        assert row["network"] == "0"
        np.testing.assert_array_equal(np.float32(row["loss"]), loss)
        assert row["overflowed_parameters"] == ("weight bias" if overflow else "")
        assert row["retries"] == "0"
        assert row["skip_reasons"] == ("loss" if overflow else "")


@pytest.mark.parametrize("kind", [*slow(*CELLS[:2]), CELLS[2]])
def test_the_rows_of_all_cells_do_not_depend_on_how_often_they_are_read(kind):
    batches = [arrays(seed, (seed in (1, 2), seed == 2)) for seed in range(5)]
    if kind == "scaled":
        batches = [(x0, y) for x0, _, y in batches]
    written = []
    for every_n_steps in (1, 3):
        monitor = LossScaleMonitor(every_n_steps, csv=f"steps{every_n_steps}.csv")
        train(Trained(kind, steps=2 if kind == "simultaneous" else 1).cell, batches, monitor)
        written.append(rows(f"steps{every_n_steps}.csv"))
    assert written[0] == written[1]
    assert len(written[0]) == 5 * (2 if kind == "alternating" else 1)


@pytest.mark.slow
def test_the_rows_of_alternating_networks():
    trained = Trained("alternating", every=(1, 2))
    batches = [arrays(seed, (False, seed == 1)) for seed in range(4)]
    train(trained.cell, batches, LossScaleMonitor(csv="steps.csv"))
    written = rows()
    assert [(row["step"], row["network"]) for row in written] == [(str(s), n) for s in range(1, 5) for n in "01"]
    assert [row["skipped"] for row in written] == ["0", "0", "0", "1", "0", "0", "0", "0"]
    assert [row["overflowed_parameters"] for row in written if row["skipped"] == "1"] == ["second.weight"]
    assert [row["applied_steps"] for row in written] == ["1", "0", "2", "0", "3", "0", "4", "1"]
    assert [float(row["loss_scale"]) for row in written[1::2]] == [1024.0, 1024.0, 512.0, 512.0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(BATCH, 1), (1,), ()])
def test_a_loss_that_is_no_scalar_is_written_as_its_sum(shape):
    losses = Losses()
    train(scaled_cell(LossOfShape(shape)), linear_batches([False]), LossScaleMonitor(csv="s.csv"), others=[losses])
    np.testing.assert_allclose(float(rows("s.csv")[0]["loss"]), losses.losses[0], rtol=1e-6)


@pytest.mark.slow
def test_a_second_run_continues_the_file():
    cell = scaled_cell()
    batches = linear_batches([False, True])
    train(cell, batches, LossScaleMonitor(csv="steps.csv"))
    train(cell, batches, LossScaleMonitor(csv="steps.csv"), epochs=2)
    written = rows()
    assert [row["step"] for row in written] == ["1", "2", "1", "2", "3", "4"]
    assert [row["skipped_steps"] for row in written] == ["0", "1", "1", "2", "2", "3"]
    with open("steps.csv") as file:
        assert file.read().count("applied_steps") == 1


@pytest.mark.slow
def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"'csv' is '.*notes\.csv', which has other columns than step, network, "):
        train(scaled_cell(), linear_batches([False]), LossScaleMonitor(csv=path))
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupted_training_loses_no_row(step):
    monitor = LossScaleMonitor(100, csv="steps.csv")
    with pytest.raises(KeyboardInterrupt):
        train(scaled_cell(), linear_batches([False, True, False]), monitor, epochs=2, others=[Failure(step)])
    assert [row["step"] for row in rows()] == [str(i + 1) for i in range(step)]


# Weights.


@quick_in_pynative_mode
@pytest.mark.parametrize("batches", [1, 60])
def test_it_warns_of_weights_that_are_nan_while_steps_are_applied(mode, batches):
    cell = scaled_cell(Frozen())
    inputs = linear_batches([False] * batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(cell, inputs, LossScaleMonitor(20))
    cell.load_state_dict({"frozen.weight": Tensor(np.float32([[np.nan, 1.0]]))}, strict=False)
    with pytest.warns(RuntimeWarning) as caught:
        train(cell, inputs, LossScaleMonitor(20), epochs=2)
        train(cell, inputs, LossScaleMonitor(20))
    (warning,) = caught
    # Within an epoch after 50 steps at the earliest, and at the end.
    found = {1: 3, 60: 120}[batches]
    assert f"after step {found} at the latest; after step {batches} they were finite: frozen.weight (1 value)." in str(
        warning.message
    )


class Frozen(Linear):
    """A linear model with a layer that is frozen."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Dense(2, 1, has_bias=False)
        self.frozen.weight.requires_grad = False


# Stopping.


@quick_in_graph_mode
def test_it_stops_a_training_that_only_skips(mode, tmp_path):
    cell = scaled_cell()
    batches = linear_batches([False, True, False, True, True, True, False])
    monitor = LossScaleMonitor(csv="steps.csv", max_consecutive_skips=3, save_batch=tmp_path / "batch.npz")
    with pytest.raises(RuntimeError) as stopped:
        train(cell, batches, monitor)
    message = str(stopped.value)
    assert message.startswith(
        "For 'LossScaleMonitor', training was stopped at step 6: the last 3 steps were skipped "
        "(max_consecutive_skips=3), at the loss scales 512, 256, 128; since step 4 all were skipped, and in the last 3 "
        "skips the gradients of weight (3) were not finite; the loss was not finite in 3 of them. What to try: no loss "
        "scale fixes a loss that is not finite, so look for NaN in the data (the weights are finite); "
        "ms_lossscale.locate_overflow(cell, inputs, loss_scale=128) names where it begins"
    )
    path = str(tmp_path / "batch.npz")
    assert message.endswith(
        f"The batch was saved: locate_overflow(network, tuple(np.load({path!r}).values()), loss_scale=128)."
    )
    assert cell.counters()["consecutive_skipped_steps"] == 3
    assert [row["step"] for row in rows()] == ["1", "2", "3", "4", "5", "6"]
    assert sorted(tmp_path.glob("batch*")) == [tmp_path / "batch.npz"]
    # What it says to do works.
    saved = tuple(np.load(path).values())
    for array, expected in zip(saved, batches[5]):
        np.testing.assert_array_equal(array, expected)
    trace = locate_overflow(cell, saved, loss_scale=128)
    assert trace.note == "The batch itself holds values that are not finite."


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "batch.data"])
def test_the_saved_file_has_the_name_that_was_asked_for(name, tmp_path):
    with pytest.raises(RuntimeError, match="The batch was saved"):
        train(scaled_cell(), linear_batches([True]), LossScaleMonitor(max_consecutive_skips=1, save_batch=name))
    assert len(np.load(tmp_path / name).files) == 2


def test_it_saves_the_call_of_a_cycle_that_overflowed():
    cell = scaled_cell(gradient_accumulation_steps=3)
    batches = linear_batches([False, True, True, False, True, False])
    with pytest.raises(RuntimeError, match="at call 6: the last 2 cycles were skipped"):
        train(cell, batches, LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz"))
    np.testing.assert_array_equal(np.load("batch.npz")["input_0"], batches[4][0])


@pytest.mark.slow
def test_it_stops_for_one_of_alternating_networks():
    trained = Trained("alternating", every=(1, 2))
    batches = [arrays(seed, (False, True)) for seed in range(6)]
    message = (
        r"stopped at step 4: the last 2 steps of network 1 were skipped .*, at the loss scales 1024, 512; since step 2 "
        r"all were skipped, and in the last 2 skips the gradients of second\.weight \(2\) were not finite"
    )
    with pytest.raises(RuntimeError, match=message):
        train(trained.cell, batches, LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz"))
    np.testing.assert_array_equal(np.load("batch.npz")["input_1"], batches[3][1])


def test_skips_that_are_not_in_a_row_stop_nothing():
    cell = scaled_cell()
    train(cell, linear_batches([True, False] * 4), LossScaleMonitor(max_consecutive_skips=2))
    assert cell.counters()["skipped_steps"] == 4


@pytest.mark.slow
def test_skips_of_an_earlier_run_stop_no_later_one():
    cell = scaled_cell(gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError):
        train(cell, linear_batches([True] * 4), LossScaleMonitor(max_consecutive_skips=2))
    # The first call of a cycle: nothing has been skipped anew.
    train(cell, linear_batches([False, False]), LossScaleMonitor(max_consecutive_skips=2))
    assert cell.counters() == {"applied_steps": 1, "skipped_steps": 2, "consecutive_skipped_steps": 0}


# The floor.


def test_it_warns_once_at_the_floor():
    cell = scaled_cell(loss_scale=DynamicLossScale(2.0, min_loss_scale=1.0))
    message = (
        r"The loss scale is stuck at its floor, min_loss_scale=1: step 2 still overflowed; since step 1 all "
        r"were skipped, and in the last 2 skips the gradients of weight \(2\) were not finite; the loss was not finite "
        r"in 2 of them\. What to try: no loss scale fixes"
    )
    with pytest.warns(RuntimeWarning, match=message) as caught:
        train(cell, linear_batches([True, True, True, True]), LossScaleMonitor(1))
    assert len([each for each in caught if each.category is RuntimeWarning]) == 1


@pytest.mark.slow
def test_it_warns_again_after_an_applied_step():
    cell = scaled_cell(loss_scale=DynamicLossScale(1.0))
    with pytest.warns(RuntimeWarning, match="stuck at its floor") as caught:
        train(cell, linear_batches([True, True, False, True]), LossScaleMonitor(1))
    assert len([each for each in caught if each.category is RuntimeWarning]) == 2


# Model.


@pytest.mark.slow
def test_with_the_data_sink(mode, capsys):
    cell = scaled_cell()
    monitor = LossScaleMonitor(1, csv="steps.csv")
    train(cell, linear_batches([False, True, False]), monitor, epochs=2, sink=True)
    assert cell.counters()["skipped_steps"] == 2
    # On CPU each step is seen, on other devices the last one of each epoch; its totals tell of all.
    assert [row["skipped_steps"] for row in rows() if row["step"] in ("3", "6")] == ["1", "2"]
    assert "step 6: " in capsys.readouterr().out


@pytest.mark.slow
def test_training_is_the_same_with_it(mode):
    cells = [scaled_cell(Mlp()) for _ in range(2)]
    batches = linear_batches([False, True, False])
    train(cells[0], batches, LossScaleMonitor(1, csv="steps.csv", max_consecutive_skips=5))
    Model(cells[1]).train(1, dataset_of(batches), dataset_sink_mode=False)
    for one, other in zip(cells[0].get_parameters(), cells[1].get_parameters()):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


# Bad input.


@pytest.mark.slow
def test_another_cell(mode):
    network = Linear()
    cell = nn.TrainOneStepCell(network, nn.SGD(network.trainable_params()))
    with pytest.raises(TypeError, match=r"'LossScaleMonitor', the training cell must be one of ms_lossscale, but"):
        train(cell, linear_batches([False]), LossScaleMonitor())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"every_n_steps": 0}, ValueError, "'every_n_steps' must be >= 1 and < 2.*, but got 0"),
        ({"every_n_steps": 1.5}, TypeError, "'every_n_steps' must be an integer >= 1, but got 1.5"),
        ({"max_consecutive_skips": 0}, ValueError, "'max_consecutive_skips' must be >= 1"),
        ({"max_consecutive_skips": "3"}, TypeError, "'max_consecutive_skips' must be an integer >= 1, but got '3'"),
        ({"csv": 3}, TypeError, "'csv' must be a path or None, but got 3"),
        ({"csv": "nowhere/steps.csv"}, ValueError, "'csv' must be in a folder that exists, but got 'nowhere/st"),
        ({"csv": ""}, ValueError, "'csv' must be a file, but '' is a folder"),
        ({"csv": "."}, ValueError, "'csv' must be a file, but '.' is a folder"),
        ({"save_batch": True}, TypeError, "'save_batch' must be a path or None, but got True"),
        ({"save_batch": "nowhere/batch.npz"}, ValueError, "'save_batch' must be in a folder that exists"),
        ({"save_batch": ".", "max_consecutive_skips": 3}, ValueError, "'save_batch' must be a file, but '.' is"),
        ({"save_batch": "batch.npz"}, ValueError, "'save_batch' .* needs 'max_consecutive_skips'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=f"For 'LossScaleMonitor', .*{message}"):
        LossScaleMonitor(**arguments)
