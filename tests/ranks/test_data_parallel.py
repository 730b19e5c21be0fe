"""Training on several ranks: processes that msrun starts, as a user does. All ranks are compared with each other, and
with what one process does that sees the whole batches, which knows nothing of ranks: see
`data_parallel_training.py`."""

import inspect
import itertools
import json

import mindspore
import numpy as np
import pytest
from conftest import MODES, nightly, slow
from mindspore import nn
from support import rank_checks
from support.data_parallel_training import TRAININGS, Place, in_mode, rows_of, train
from support.networks import Linear
from support.npu_networks import LOSS_SCALE
from support.ranks_program import QUICK, folder_of, records_of
from support.training import changed, same_bits

from ms_lossscale import AlternatingTrainOneStepCell, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

TRAINED = pytest.mark.parametrize(
    "name, mode, ranks",
    [
        *((name, "graph", 2) for name in TRAININGS if name in QUICK),
        *slow(*((name, mode, 2) for mode in MODES for name in TRAININGS if mode != "graph" or name not in QUICK)),
        *nightly(*(("bounded", mode, 4) for mode in MODES)),
    ],
)
# What a skipped step may change: a cycle keeps the scale that it used.
BOOKKEEPING = ("loss_scale", "counters", "overflow", "norms", "clipping.", "forward_state.")
in_slow_job = pytest.mark.parametrize("mode", slow(*MODES))


@pytest.fixture
def job(tmp_path_factory, worker_id):
    """A function that gives for each rank the records of a scenario, of the job that has it."""
    return lambda *of: records_of(folder_of(tmp_path_factory, worker_id), *of)


@pytest.fixture(scope="module")
def control():  # A function that gives the records of one process alone that sees the whole batches.
    results = {}

    def of(name, mode, ranks):
        if (name, mode, ranks) not in results:
            results[name, mode, ranks] = in_mode(mode, train, name, Place(0, 1), ranks)
        return results[name, mode, ranks]

    return of


def own(name):
    """Whether its values are each rank's own, what its rows of the batch left behind; or are stored as MindSpore is."""
    of_ranks = ("moving_mean", "moving_variance", "last_losses", "alternation.losses")
    return name.endswith(of_ranks) or "forward_state." in name or "clipping." in name


def after_cycles(name, records):
    """The records after which every rank must hold the same: those of whole cycles, and the last one."""
    steps = TRAININGS[name].steps
    return [*records[::steps], *([records[-1]] if (len(records) - 1) % steps else [])]


@TRAINED
def test_ranks_hold_the_same_after_every_step(job, name, mode, ranks):
    """Bit for bit: weights, optimizer, scale, counters, averages, norms, conditions."""
    for first, *others in zip(*(after_cycles(name, records) for records in job(name, mode, ranks))):
        for other in others:
            assert {each for each in changed(first, other) if not own(each)} == set()


@TRAINED
def test_ranks_with_parts_of_a_batch_train_as_one_with_the_whole(job, control, name, mode, ranks):
    """Scale, counters and what is skipped are equal; weights, averages and norms up to the rounding of float32."""
    records, expected = job(name, mode, ranks)[-1], control(name, mode, ranks)
    assert len(records) == len(expected)
    for record, wanted in zip(*(after_cycles(name, its) for its in (records, expected))):
        for key, value in wanted.items():
            if own(key):
                continue
            if value.dtype.kind == "f" and "scale" not in key:
                np.testing.assert_allclose(record[key], value, rtol=2e-5, atol=2e-7, err_msg=key)
            else:
                assert np.array_equal(record[key], value), key


@TRAINED
def test_a_step_that_is_skipped_leaves_nothing_on_any_rank(job, name, mode, ranks):
    """But the loss scale and counters, also where a rank's own rows were fine; in others its own statistics move."""
    for records in job(name, mode, ranks):
        steps, happened = after_cycles(name, records), set()
        for before, after in zip(steps, steps[1:]):
            if "overflow" not in after:
                continue
            moved = {key for key in before.keys() & after.keys() if not same_bits(before[key], after[key])}
            moved = {key for key in moved if not any(each in key for each in BOOKKEEPING)}
            # Of two networks that decide alone, one may skip its step.
            happened.update(after["overflow"].ravel().tolist())
            if after["overflow"].all():
                assert moved == set()
            elif not after["overflow"].any():
                assert any(key.endswith("weight") for key in moved)
                assert any(key.endswith("moving_mean") for key in moved)
        assert happened == ({False} if name == "unchecked" else {False, True})


@in_slow_job
def test_what_has_happened_in_these_trainings(job, mode):
    """Retries, scales that some overflows leave alone, conditions, and scales that were found for all ranks' rows."""

    def counted(name):
        return json.loads(str(job(name, mode)[0][-1]["counters"]))

    assert all(counted(name)["retries"] > 0 for name in ("summed", "simultaneous"))
    assert counted("conditions")["skipped_by_condition"] == 2
    assert counted("manual_eager")["skipped_by_condition"] == 1
    scales = [float(record["loss_scale.scale_value"]) for record in job("patient", mode)[0]]
    assert scales == [2.0**13, 2.0**13, 2.0**13, 2.0**13, 2.0**12, 2.0**12]
    found = job("simultaneous", mode)[0][0]
    assert found["found"].tolist() == found["kept"].tolist() == [2.0**12, 2.0**11]
    assert "found no loss scale of network 0" in str(found["refused"])


@pytest.mark.parametrize("mode", ["graph", *slow("pynative")])
def test_weights_that_each_rank_has_for_itself(job, mode):
    """Against NumPy. All ranks skip an overflow that shows in one rank's own weights, and only their network's scale
    backs off. A norm is that of the common weights and of all ranks' own: it clips, and conditions look at it."""
    by_rank = job("own_weights", mode)
    names = ("a.weight", "a.bias", "bb.weight", "bb.bias")
    weights = [{name: records[0][name].astype(np.float64) for name in names} for records in by_rank]
    scales = np.array(rank_checks.OWN_SCALES)
    for call, kinds in enumerate(rank_checks.OWN_CALLS):
        grads = [{}, {}]
        for rank, network in itertools.product(range(2), ("a", "bb")):
            place = Place(rank, 2)
            rows = rows_of(place, call, kinds if network == "bb" else "..", 2)
            x, y, valid = (each.asnumpy().astype(np.float64) for each in rows)
            errors = x @ weights[rank][f"{network}.weight"] + weights[rank][f"{network}.bias"] - y
            of_loss = 2 * errors * valid / len(y)
            grads[rank].update({f"{network}.weight": x.T @ of_loss, f"{network}.bias": of_loss.sum(keepdims=True)})
        common = (grads[0]["a.weight"] + grads[1]["a.weight"]) / 2
        for its in grads:
            its["a.weight"] = common
        squares = {name: sum(np.square(its[name]).sum() for its in grads) for name in names}
        norms = np.sqrt([squares["a.weight"] / 2 + squares["a.bias"], squares["bb.weight"] + squares["bb.bias"]])
        overflows, is_spike = kinds == ".s", np.linalg.norm(norms) > rank_checks.OWN_MAX_NORM
        assert overflows or is_spike == (kinds == "p.")
        scales = scales / [1, 1 + overflows]
        for records, its_weights, its_grads in zip(by_rank, weights, grads):
            record = records[call + 1]
            assert bool(record["overflow"]) == (overflows or is_spike)
            assert record["scales"].tolist() == scales.tolist()
            np.testing.assert_allclose(record["norms"][: 1 if overflows else 2], norms[: 1 if overflows else 2], 2e-3)
            for name in names:
                if not record["overflow"]:
                    norm = norms[int(name.startswith("bb"))]
                    its_weights[name] -= rank_checks.OWN_RATE * its_grads[name] * min(1.0, rank_checks.OWN_CLIP / norm)
                np.testing.assert_allclose(record[name], its_weights[name], rtol=1e-3, atol=1e-4)
    assert not same_bits(by_rank[0][-1]["bb.weight"], by_rank[1][-1]["bb.weight"])


@pytest.mark.parametrize("mode, ranks", slow(*((mode, 2) for mode in MODES)) + nightly(*((mode, 4) for mode in MODES)))
def test_a_register_on_one_rank_skips_the_step_on_all(job, mode, ranks):
    """In saturation mode: the gradients are finite, and all zero where the forward overflowed."""
    by_rank = job("saturating", mode, ranks)
    # Whose register was raised in the second and in the third step.
    assert [bool(records[1]["raised"]) for records in by_rank] == [rank == ranks - 1 for rank in range(ranks)]
    assert [bool(records[2]["raised"]) for records in by_rank] == [rank == 0 for rank in range(ranks)]
    for records in by_rank:
        assert [bool(record["overflow"]) for record in records] == [False, True, True, False]
        assert [float(record["weight"][0]) for record in records] == [0.5, 0.5, 0.5, 0.0]
        scales = [LOSS_SCALE, LOSS_SCALE, LOSS_SCALE / 2, LOSS_SCALE / 4]
        assert [float(record["loss_scale"]) for record in records] == scales


@in_slow_job
def test_gradients_that_overflow_in_the_sum_skip_the_step_on_all_ranks(job, mode):
    for record in itertools.chain(*job("large_gradients", mode)):
        assert record["overflow"]
        assert record["weight"] == 1.0
    assert not any(record["overflow"] for record in in_mode(mode, rank_checks.large_gradients, Place(0, 1)))


@in_slow_job
def test_ranks_that_train_apart_decide_alone_and_are_warned(job, mode):
    """Unless `gradients_reduced` says that something else reduces the gradients."""
    for rank, (first, *records) in enumerate(job("apart", mode)):
        (warning,) = first["warnings"]
        assert "there are 2 ranks" in warning
        assert "gradients_reduced=True" in warning
        assert [bool(record["overflow"]) for record in records] == [False, rank == 1]


@pytest.mark.parametrize("name", rank_checks.DIFFERENCES)
def test_ranks_with_different_cells_are_told_so_at_the_first_step(job, name):  # Or when they look for a loss scale.
    for _, errors in job("different", "graph"):
        message = str(errors[name])
        assert "all ranks must train the same cell, but rank 1 differs from rank 0" in message
        named = message.split(" on this rank: ")[1].split(" Pass the same")[0]
        assert name in named
        assert not [word for word in ("number=", "is_checked", "when_set", "counters=", "seed") if word in named]


def test_what_a_rank_has_made_before_is_no_difference(job):
    for equal, _ in job("different", "graph"):
        assert str(equal["equal"]) == ""


def test_no_setting_can_be_forgotten_when_ranks_compare():
    keywords = list(inspect.signature(ScaledTrainOneStepCell).parameters)
    assert keywords[:3] == ["network", "optimizer", "loss_scale"]
    assert sorted(keywords[3:]) == sorted(rank_checks.SETTINGS)


@pytest.mark.slow
def test_what_a_cell_would_keep_of_split_weights_is_refused(job):
    for refused in itertools.chain(*job("split_weights", "graph")):
        assert str(refused["clip_value"]) == ""
        for name in ("gradient_accumulation_steps", "ema_decay", "weighted", "pipeline_stages"):
            assert f"'{name}' is not supported with parallel_mode='{refused['mode']}'" in str(refused[name])


def test_ranks_can_agree_on_nothing_without_communication():
    network = Linear()
    optimizer = nn.SGD(network.trainable_params())
    with pytest.raises(RuntimeError, match=r"'gradients_reduced' is True. Call .*init\(\).*msrun.*train alone"):
        ScaledTrainOneStepCell(network, optimizer, gradients_reduced=True)
    for value in (1, None, "", ["group"]):
        with pytest.raises(TypeError, match="'gradients_reduced' must be True, False or the name of a comm"):
            ScaledTrainOneStepCell(network, optimizer, gradients_reduced=value)
    for mode, make in (
        ("data_parallel", lambda: ScaledTrainOneStepCell(network, optimizer)),
        ("hybrid_parallel", lambda: SimultaneousTrainOneStepCell([network], [optimizer])),
        ("semi_auto_parallel", lambda: AlternatingTrainOneStepCell([network], [optimizer])),
    ):
        mindspore.set_auto_parallel_context(parallel_mode=mode)
        try:
            with pytest.raises(RuntimeError, match=rf"{mode}(.|\n)*stand_alone") as error:
                make()
        finally:
            mindspore.reset_auto_parallel_context()
        assert "mindspore.communication.init()" in str(error.value) and "msrun" in str(error.value)
