"""The batches of skipped steps that LossScaleMonitor keeps: which, how many, how large, and how they are written."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Tensor
from mindspore import dtype as mstype
from support.bad_batches import bad, good, pair, patient, steep, trained
from support.retried_networks import inputs
from support.sloped_networks import manual, with_norm
from test_loss_scale_monitor import linear_batches, scaled_cell, train
from test_monitored_reasons import spiky, watch

from ms_lossscale import AlternatingTrainOneStepCell, LossScaleMonitor, NormSpike, locate_overflow
from ms_lossscale.callbacks import kept_batches
from ms_lossscale.callbacks.kept_batches import KeptBatches

FOLDER = Path("kept")


def monitor(**keywords):
    return LossScaleMonitor(100, save_batches=FOLDER, **keywords)


def names():
    return sorted(path.name for path in FOLDER.iterdir())


def of_norms(norms, its=None, **keywords):
    """Makes steps with these norms, and keeps the batches of those that are skipped."""
    watch(its or spiky(), map(with_norm, norms), monitor(**keywords))


def kept_norms():
    """Returns the norms of the inputs that were kept, in the order of the files' names."""
    return [float(2 * np.load(FOLDER / name)["input_0"][0]) for name in names()]


def test_the_last_ones_of_each_reason_are_kept(mode):
    its = trained(patient(), skip_conditions=[NormSpike(max_norm=10.0)])
    batches = [good(), inputs(11.0), bad(), steep(), inputs(12.0), inputs(13.0), bad(), good()]
    watch(its, batches, monitor(batches_per_reason=2))
    assert names() == [
        "000002_step_3_loss.npz",
        "000003_step_4_gradients.npz",
        "000004_step_5_condition.npz",
        "000005_step_6_condition.npz",
        "000006_step_7_loss.npz",
    ]
    for name, batch in zip(names(), (batches[i] for i in (2, 3, 4, 5, 6))):
        saved = tuple(np.load(FOLDER / name).values())
        assert len(saved) == len(batch)
        for array, expected in zip(saved, batch):
            np.testing.assert_array_equal(array, expected.asnumpy())


@quick_in_graph_mode
def test_in_model(mode):
    batches = linear_batches([False, True, False, True])
    its = scaled_cell()
    train(its, batches, monitor(batches_per_reason=1))
    assert names() == ["000002_step_4_loss.npz"]
    saved = tuple(np.load(FOLDER / names()[0]).values())
    np.testing.assert_array_equal(saved[0], batches[3][0])
    # What the docstring says to do with it works.
    assert locate_overflow(its, saved, loss_scale=512).note == "The batch itself holds values that are not finite."


@quick_in_pynative_mode
def test_around_a_manual_step(mode):
    step, train_step = manual(patient(), skip_conditions=[NormSpike(max_norm=10.0)])
    kept = monitor()
    with kept.watching(step):
        for norm in (64.0, np.nan, 1.0):
            # One input, by itself.
            kept.after_step(*train_step(with_norm(norm)), inputs=with_norm(norm))
    assert names() == ["000001_step_1_condition.npz", "000002_step_2_loss.npz"]


@quick_in_pynative_mode
def test_numbering_goes_on_with_what_earlier_trainings_left(mode):
    for _ in range(2):
        of_norms([64.0, 65.0], batches_per_reason=3)
    assert kept_norms() == [65.0, 64.0, 65.0]
    assert names() == [f"00000{i}_step_{step}_condition.npz" for i, step in ((2, 2), (3, 1), (4, 2))]


@quick_in_pynative_mode
def test_each_network_and_each_cycle(mode):
    its = pair(AlternatingTrainOneStepCell, patient(), skip_conditions=[NormSpike(max_norm=10.0)])
    watch(its, [(*good(), *inputs(11.0)), (*bad(), *steep())], monitor())
    assert names() == [
        "000001_step_1_network_1_condition.npz",
        "000002_step_2_network_0_loss.npz",
        "000003_step_2_network_1_gradients.npz",
    ]
    assert len(np.load(FOLDER / names()[0]).files) == 4


@quick_in_pynative_mode
def test_a_cycle_keeps_what_overflowed_first_or_the_last_call_of_a_spike(mode):
    its = spiky(gradient_accumulation_steps=3)
    of_norms([1.0, np.inf, np.inf, 20.0, 21.0, 22.0], its)
    assert names() == ["000001_call_3_loss.npz", "000002_call_6_condition.npz"]
    assert kept_norms() == [np.inf, 22.0]
    # A flushed cycle.
    for norms in ((np.inf, 3.0), (30.0, 31.0)):
        watch(its, map(with_norm, norms), monitor(), flush=True)
    assert kept_norms()[2:] == [np.inf, 31.0]


@quick_in_pynative_mode
def test_the_batch_that_stops_a_training_is_not_an_older_one(mode):
    """Of a cycle that a condition skips when it is flushed, no call overflowed."""
    its = spiky(gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="The batch was saved"):
        watch(
            its,
            map(with_norm, (np.inf, 1.0, 30.0)),
            LossScaleMonitor(max_consecutive_skips=2, save_batch="batch.npz"),
            flush=True,
        )
    assert 2 * np.load("batch.npz")["input_0"][0] == 30.0


# The budget. Each file takes up to this much for its 16 bytes, and in fact less.
ONE = 2 * 1024 + 16


def sizes():
    return [path.stat().st_size for path in FOLDER.iterdir()]


@quick_in_pynative_mode
def test_the_files_never_take_more_than_their_budget(mode, monkeypatch):
    largest, save = [], kept_batches.save_inputs

    def recorded(path, batch):
        save(path, batch)
        largest.append(sum(sizes()))

    monkeypatch.setattr(kept_batches, "save_inputs", recorded)
    of_norms([64.0 + i for i in range(12)], batches_per_reason=100, max_bytes=2 * ONE)
    assert len(largest) == 12 and max(largest) <= 2 * ONE
    # The oldest go first. Files are smaller than what is expected of the next one.
    assert kept_norms() == [64.0 + i for i in range(12)][-len(names()) :]
    assert len(names()) >= 2


@quick_in_pynative_mode
def test_what_there_is_most_of_goes_first(mode):
    size = 0
    of_norms([64.0])
    (size,) = sizes()
    its = spiky(patient())
    # There is room for three, of which the first is of another reason, older than the others.
    of_norms([np.nan, 71.0, 72.0, 73.0], its, batches_per_reason=100, max_bytes=2 * size + ONE)
    assert [name.partition("_step_")[2] for name in names()] == [
        "1_loss.npz",
        "3_condition.npz",
        "4_condition.npz",
    ]


@quick_in_pynative_mode
def test_a_batch_beyond_the_budget_is_told_of_once(mode):
    of_norms([64.0], max_bytes=ONE)
    with pytest.warns(RuntimeWarning, match=rf"takes up to {ONE} bytes, more than max_bytes={ONE - 1}, and is not"):
        of_norms([65.0], max_bytes=ONE - 1)
    # Nothing was removed for it.
    assert kept_norms() == [64.0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_norms([65.0, 66.0], max_bytes=1)
    assert len([each for each in caught if "max_bytes" in str(each.message)]) == 1


def test_the_estimate_is_above_the_size_of_a_file(tmp_path):
    for batch in (
        (Tensor(np.zeros((2, 3), np.float32)),),
        tuple(np.zeros((1,) * 8, np.float64) for _ in range(30)),
        (Tensor(np.zeros(1000, np.float32)).astype(mstype.bfloat16), 3, 2.5),
        (),
    ):
        kept_batches.save_inputs(tmp_path / "batch.npz", batch)
        arrays = kept_batches._arrays(batch)
        size = (tmp_path / "batch.npz").stat().st_size
        assert size <= sum(each.nbytes for each in arrays) + 1024 * (1 + len(arrays))
        assert len(np.load(tmp_path / "batch.npz").files) == len(batch)


# Files.


@quick_in_pynative_mode
def test_only_its_own_files_are_removed(mode):
    FOLDER.mkdir()
    for name in ("notes.txt", "batch.npz", "000001_step_1_loss.npz.bak", "000001_step_1_condition.part.npz"):
        (FOLDER / name).write_bytes(bytes(10 * ONE))
    of_norms([64.0, 65.0], batches_per_reason=1, max_bytes=ONE)
    # But for one that a killed run has left unfinished.
    assert names() == ["000001_step_1_loss.npz.bak", "000002_step_2_condition.npz", "batch.npz", "notes.txt"]


@quick_in_pynative_mode
def test_a_file_is_whole_or_not_there(mode, monkeypatch):
    def fails(file, **arrays):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_batches.np, "savez", fails)
    its = spiky()
    with pytest.warns(RuntimeWarning, match="'save_batches' is 'kept', which can't be written: No space left") as told:
        of_norms([64.0, 65.0, 1.0], its)
    assert len(told) == 1 and names() == []
    assert its.counters() == {
        "applied_steps": 1,
        "skipped_steps": 2,
        "consecutive_skipped_steps": 0,
        "skipped_by_condition": 2,
    }


@quick_in_pynative_mode
def test_a_file_that_somebody_removed(mode):
    kept = KeptBatches(FOLDER, 1, 2**20)
    kept.begin()
    kept.keep("step_1", "loss", (np.zeros(1),))
    (FOLDER / names()[0]).unlink()
    kept.keep("step_2", "loss", (np.ones(1),))
    assert names() == ["000002_step_2_loss.npz"]


@quick_in_pynative_mode
def test_a_batch_that_is_not_known(mode):
    with pytest.warns(RuntimeWarning, match=r"could not be kept: it was not passed. Pass it to after_step") as told:
        kept, its = monitor(), spiky()
        with kept.watching(its):
            for _ in range(2):
                kept.after_step(*its(with_norm(64.0)))
    assert len(told) == 1


@quick_in_pynative_mode
def test_with_a_data_sink(mode):
    """As on a device, where Model gives no batch."""
    its, kept = spiky(), monitor()
    params = SimpleNamespace(train_network=its, cur_step_num=1)
    run_context = SimpleNamespace(original_args=lambda: params)
    kept.on_train_begin(run_context)
    params.net_outputs = its(with_norm(64.0))
    with pytest.warns(RuntimeWarning, match="with a data sink, MindSpore does not give it to callbacks"):
        kept.on_train_step_end(run_context)
    assert names() == []


@quick_in_pynative_mode
def test_batches_are_not_held(mode):
    """The host looks at each step at once, so that no more than the last batch is held."""
    kept, its = monitor(), spiky()
    with kept.watching(its):
        for _ in range(3):
            kept.after_step(*its(with_norm(1.0)), inputs=with_norm(1.0))
            assert not kept._unread
    plain = LossScaleMonitor(100)
    with plain.watching(its):
        plain.after_step(*its(with_norm(1.0)), inputs=with_norm(1.0))
        assert plain._last[2] is None and plain._unread[0][2] is None


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"save_batches": 3}, TypeError, "'save_batches' must be a path or None, but got 3"),
        (
            {"save_batches": "no/where"},
            ValueError,
            "'save_batches' must be in a folder that exists, but got 'no/where'",
        ),
        ({"save_batches": __file__}, ValueError, "'save_batches' must be a folder, but '.*' is a file"),
        ({"batches_per_reason": 0}, ValueError, "'batches_per_reason' must be >= 1"),
        ({"max_bytes": 0}, ValueError, "'max_bytes' must be a number >= 1, but got 0"),
        ({"max_bytes": "1 GB"}, TypeError, "'max_bytes' must be a number, but got '1 GB'"),
    ],
)
def test_wrong_arguments(keywords, error, message):
    with pytest.raises(error, match=f"For 'LossScaleMonitor', the argument {message}"):
        LossScaleMonitor(**keywords)
