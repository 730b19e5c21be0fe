"""
Training on several ranks: processes that msrun starts, as a user does.

All ranks are compared with each other, and with what one process does that sees the whole batches, which knows nothing
of ranks. MindSpore takes seconds to start, so a job runs many scenarios of `data_parallel_training.py` and
`rank_checks.py`, and the tests read what its ranks wrote.
"""

import mindspore
import numpy as np
import pytest
from conftest import MODES, nightly, slow, slow_in_graph_mode
from mindspore import nn
from support import data_parallel_training as scenarios
from support.data_parallel_training import CLIP_NORM, CYCLE_CALLS, CYCLE_PLAN, PLAN, STEPS, Place, run
from support.networks import Linear, LinearWithBias
from support.npu_networks import LOSS_SCALE
from support.python_process import check_msrun, skip_with_older_mindspore
from support.rank_checks import DIFFERENCES
from support.ranks_program import JOBS, SCRIPT, written
from support.retried_networks import LEARNING_RATE
from support.training import bookkeeping, changed, same_bits

from ms_lossscale import AlternatingTrainOneStepCell, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

RANKS = pytest.mark.parametrize("ranks", [2, *nightly(4)])
FURTHER = ("summed", "cycle", "simultaneous", "alternating", "unchecked")
# Those that are compared with one process that sees the whole batches.
COMPARED = pytest.mark.parametrize(
    ("mode", "name", "ranks"),
    [
        ("graph", "one_network", 2),
        *slow(("pynative", "one_network", 2), *(("graph", name, 2) for name in FURTHER)),
        *nightly(*((mode, "one_network", 4) for mode in MODES), *(("pynative", name, 2) for name in FURTHER)),
    ],
    indirect=["mode"],
)
CYCLES = ("cycle", "alternating")


@pytest.fixture(params=["graph", *slow("pynative")])
def mode(request):
    """The mode of the job, and of its control."""
    return request.param


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function that gives for each rank the records of a scenario. The job that has it runs once."""
    results = {}

    def of(name, mode, ranks=2):
        if ranks > 2:
            skip_with_older_mindspore()
        its = next(job for job in JOBS if job.ranks == ranks and f"{name}/{mode}" in job.scenarios)
        if its not in results:
            folder = tmp_path_factory.mktemp("ranks")
            results[its] = None
            check_msrun(ranks, SCRIPT, folder, *its.scenarios, cwd=folder)
            results[its] = [written(folder / f"rank_{rank}.npz") for rank in range(ranks)]
        if results[its] is None:
            pytest.fail("its job has failed, as the first test that needed it shows")
        return [scenarios[f"{name}/{mode}"] for scenarios in results[its]]

    return of


@pytest.fixture(scope="module")
def control():
    """A function that gives the records of one process alone that sees the whole batches."""
    results = {}

    def of(name, mode, ranks):
        if (name, mode, ranks) not in results:
            results[name, mode, ranks] = run(getattr(scenarios, name), mode, Place(0, 1), ranks)
        return results[name, mode, ranks]

    return of


def own(names):
    """Those of the names whose values are each rank's own: what its rows of the batch left behind."""
    return {
        name for name in names if name in ("mean", "variance", "alternation.last_losses") or "forward_state." in name
    }


def moved(records, call):
    """The names of what the call has changed in the cell; what it returned and measured is left out."""
    before, after = ({key: value for key, value in records[i].items() if key in records[0]} for i in (call, call + 1))
    return {name for name in changed(before, after) if not name.startswith(("clipping.", "grad_norm", "comparisons"))}


def of_step(name, calls):
    """The records after which every rank must hold the same: those of whole cycles."""
    return range(0, calls + 1, 2 if name in CYCLES else 1)


@COMPARED
def test_ranks_hold_the_same_after_every_step(job, mode, name, ranks):
    """Weights, momentum, scale, counters, EMA and gradient norm, bit for bit."""
    by_rank = job(name, mode, ranks)
    for i in of_step(name, len(by_rank[0]) - 1):
        first = by_rank[0][i]
        for other in by_rank[1:]:
            assert changed(first, other[i]) <= own(first)


@COMPARED
def test_ranks_with_parts_of_a_batch_train_as_one_with_the_whole(job, control, mode, name, ranks):
    """Scale, counters and overflows are equal; weights, momentum, EMA and norms up to the rounding of float32."""
    records, expected = job(name, mode, ranks)[-1], control(name, mode, ranks)
    assert len(records) == len(expected)
    for i in of_step(name, len(records) - 1):
        for key in expected[i].keys() - own(expected[i]) - {"comparisons"}:
            # How it is stored depends on whether gradients are reduced; `grad_norm` is what it means.
            if "clipping." in key:
                continue
            if bookkeeping([key.split(".", 1)[-1]]) or bookkeeping([key]) or key == "loss_scale":
                assert same_bits(records[i][key], expected[i][key]), key
            else:
                np.testing.assert_allclose(records[i][key], expected[i][key], rtol=2e-5, atol=1e-7, err_msg=key)


@RANKS
def test_all_ranks_skip_what_overflowed_on_any(job, mode, ranks):
    """A rank whose own batch is fine skips with the others, and nothing but the scale and the counters moves."""
    for records in job("one_network", mode, ranks):
        assert [bool(record["overflow"]) for record in records[1:]] == [call in PLAN for call in range(STEPS)]
        for call in range(STEPS):
            names = moved(records, call)
            if call in PLAN:
                assert names == bookkeeping(names)
            else:
                assert {"hidden.weight", "ema.hidden.weight", "mean"} <= names


@RANKS
def test_the_norm_of_the_reduced_gradients_clips(job, control, mode, ranks):
    """Each rank's own norm is another one. The bound is below it in every step."""
    norms = [[float(record["grad_norm"]) for record in records[1:]] for records in job("one_network", mode, ranks)]
    np.testing.assert_array_equal(norms, [norms[0]] * ranks)
    expected = [float(record["grad_norm"]) for record in control("one_network", mode, ranks)[1:]]
    np.testing.assert_allclose(norms[0], expected, rtol=1e-5)
    for call, norm in enumerate(norms[0]):
        assert np.isfinite(norm) == (call not in PLAN)
        assert norm > CLIP_NORM or call in PLAN


@slow_in_graph_mode
def test_a_cycle_is_skipped_on_all_ranks_for_one_call_on_one_rank(job, mode):
    """And the statistics of its other calls, which each rank's forwards have moved, are restored."""
    for records in job("cycle", mode):
        for end in range(2, CYCLE_CALLS, 2):
            before, after = records[end - 2], records[end]
            skipped = not CYCLE_PLAN.keys().isdisjoint((end - 2, end - 1))
            assert bool(after["overflow"]) == skipped
            assert after["step_counters.skipped_steps"] - before["step_counters.skipped_steps"] == skipped
            for name in ("mean", "variance", "hidden.weight", "ema.hidden.weight"):
                assert same_bits(before[name], after[name]) == skipped, name


@slow_in_graph_mode
def test_a_partial_cycle_is_flushed_on_all_ranks(job, control, mode):
    """The last call was the only one of its cycle."""
    for records in job("cycle", mode):
        assert not same_bits(records[-2]["hidden.weight"], records[-1]["hidden.weight"])
        expected = control("cycle", mode, 2)[-1]["hidden.weight"]
        np.testing.assert_allclose(records[-1]["hidden.weight"], expected, rtol=2e-5)


@RANKS
def test_a_register_on_one_rank_skips_the_step_on_all(job, mode, ranks):
    """In saturation mode: the gradients are finite, and all zero where the forward overflowed."""
    by_rank = job("saturating", mode, ranks)
    # Whose register was raised in the second and in the third step.
    assert [bool(records[2]["raised"]) for records in by_rank] == [rank == ranks - 1 for rank in range(ranks)]
    assert [bool(records[3]["raised"]) for records in by_rank] == [rank == 0 for rank in range(ranks)]
    for records in by_rank:
        assert [bool(record["overflow"]) for record in records[1:]] == [False, True, True, False]
        assert [float(record["network.weight"][0]) for record in records] == [1.0, 0.5, 0.5, 0.5, 0.0]
        scales = [LOSS_SCALE, LOSS_SCALE, LOSS_SCALE / 2, LOSS_SCALE / 4]
        assert [float(record["loss_scale"]) for record in records[1:]] == scales


def test_ranks_agree_where_gradients_are_not_reduced(job, mode):
    """Each rank trains weights of its own, on its own rows, but skips with the others."""
    by_rank = job("own_weights", mode)
    for rank, records in enumerate(by_rank):
        assert [bool(record["overflow"]) for record in records[1:]] == [call in PLAN for call in range(STEPS)]
        expected = run(scenarios.own_weights_alone, mode, Place(rank, 2))[-1]["hidden.weight"]
        np.testing.assert_allclose(records[-1]["hidden.weight"], expected, rtol=1e-6)
        assert same_bits(records[-1]["loss_scale.scale_value"], by_rank[0][-1]["loss_scale.scale_value"])
    assert not same_bits(by_rank[0][-1]["hidden.weight"], by_rank[1][-1]["hidden.weight"])


def test_a_norm_with_a_ranks_own_weights_is_that_of_all_ranks(job, mode):
    """Against NumPy. Clipping by different norms would move the common weight to different places."""
    network = LinearWithBias()
    w, b = network.weight.asnumpy().astype(np.float64), network.bias.asnumpy().astype(np.float64)
    x, y = (array.astype(np.float64) for array in scenarios.whole_batch(0))
    errors = x @ w + b - y
    of_weights, of_biases = [], []
    for rank in range(2):
        rows = scenarios.rows_of(rank, 2)
        of_errors = 2 * errors[rows] / errors[rows].size
        of_weights.append(x[rows].T @ of_errors)
        of_biases.append(of_errors.sum(axis=0))
    of_weight = np.mean(of_weights, axis=0)
    norm = np.sqrt(np.square(of_weight).sum() + np.square(of_biases).sum())
    assert norm > CLIP_NORM
    for rank, (_, record) in enumerate(job("partly_own_weights", mode)):
        np.testing.assert_allclose(record["grad_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(record["weight"], w - 0.1 * of_weight * CLIP_NORM / norm, rtol=1e-5)
        np.testing.assert_allclose(record["bias"], b - 0.1 * of_biases[rank] * CLIP_NORM / norm, rtol=1e-5)


@slow_in_graph_mode
def test_ranks_that_train_alone_decide_alone(job, mode):
    """With communication initialised, and the parallel mode stand_alone."""
    by_rank = job("alone", mode)
    for rank, records in enumerate(by_rank):
        expected = run(scenarios.alone, mode, Place(rank, 2))
        overflows = [bool(record["overflow"]) for record in records[1:]]
        assert overflows == [rank in {r % 2 for r in PLAN.get(call, ())} for call in range(STEPS)]
        for record, wanted in zip(records, expected):
            assert not changed(record, wanted)


@pytest.mark.parametrize("mode", slow("graph", "pynative"), indirect=True)
def test_ranks_whose_gradients_hooks_reduce_agree(job, mode):
    """On an overflow that only one rank's BatchNorm shows. Without the keyword they do not, and are warned."""
    by_rank = job("reduced_by_hooks", mode)
    for records in by_rank:
        assert [bool(record["overflow"]) for record in records[:3]] == [False, True, False]
        assert [float(record["loss_scale"]) for record in records[:3]] == [2.0**10, 2.0**10, 2.0**9]
        assert "train apart" not in str(records[0]["warnings"])
        assert "there are 2 ranks" in str(records[3]["warnings"])
        assert "gradients_reduced=True" in str(records[3]["warnings"])
    first, second = by_rank
    for mine, other in zip(first[:3], second[:3]):
        names = ("hidden.weight", "loss_scale.scale_value", "step_counters.skipped_steps")
        assert all(same_bits(mine[name], other[name]) for name in names)
    assert [[bool(record["overflow"]) for record in records[3:]] for records in by_rank] == [
        [False, False, False],
        [False, True, False],
    ]
    assert not same_bits(first[-1]["hidden.weight"], second[-1]["hidden.weight"])


def test_gradients_that_overflow_in_the_sum_skip_the_step_on_all_ranks(job, mode):
    for records in job("large_gradients", mode):
        assert records[1]["overflow"]
        assert records[1]["weight"] == 1.0
    alone = run(scenarios.large_gradients, mode, Place(0, 1))
    assert not alone[1]["overflow"]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_with_different_cells_are_told_so_at_the_first_step(job, mode, name):
    for records in job("different", mode):
        message = str(records[0][name])
        assert "all ranks must train the same cell, but rank 1 differs from rank 0" in message
        difference = next(part for part in message.split(". ", 1)[1].split("; ") if name in part)
        assert "on rank 0, " in difference
        assert "on rank 1" in difference


def test_ranks_compare_their_cells_once(job, mode):
    for records in job("one_network", mode):
        assert [int(record["comparisons"]) for record in records] == [0] + [1] * STEPS


@pytest.mark.parametrize(
    ("mode", "name", "steps"),
    [
        ("graph", "retried_cycle", 2),
        *slow(("pynative", "retried_cycle", 2), ("graph", "retried", 1)),
        *nightly(("pynative", "retried", 1)),
    ],
    indirect=["mode"],
)
def test_all_try_again_together(job, mode, name, steps):
    """Whichever of them overflowed; what an attempt wrote is not there."""
    # Overflow, scale, counters, weight and forwards.
    expected = [
        (False, 2.0**12, [1, 0, 0, 3], 1 - 4.5 * LEARNING_RATE, steps),
        (False, 2.0**11, [2, 0, 0, 4], 1 - 13 * LEARNING_RATE, 2 * steps),
        (True, 2.0**11, [2, 1, 1, 4], 1 - 13 * LEARNING_RATE, 2 * steps),
        (False, 2.0**10, [3, 1, 0, 4], 1 - 14 * LEARNING_RATE, 3 * steps),
    ]
    for records in job(name, mode):
        assert [
            (
                bool(record["overflow"]),
                float(record["loss_scale"]),
                record["counters"].tolist(),
                float(record["slope.weight"][0]),
                int(record["slope.calls"]),
            )
            for record in records
        ] == expected


# For each call whether it overflowed, the scales that it used, and those of the next one.
OWN_SCALES = {
    "own_scales": [
        (False, [2.0**15, 2.0**14], [2.0**15, 2.0**14]),
        (True, [2.0**15, 2.0**14], [2.0**14, 2.0**14]),
        (True, [2.0**14, 2.0**14], [2.0**14, 2.0**13]),
        (True, [2.0**14, 2.0**13], [2.0**13, 2.0**12]),
        (True, [2.0**13, 2.0**12], [2.0**13, 2.0**11]),
    ],
    "own_scales_retried": [
        (False, [2.0**15, 2.0**14], [2.0**15, 2.0**14]),
        (False, [2.0**13, 2.0**14], [2.0**13, 2.0**14]),
        (False, [2.0**13, 2.0**12], [2.0**13, 2.0**12]),
        (False, [2.0**12, 2.0**11], [2.0**12, 2.0**11]),
        (True, [2.0**12, 2.0**11], [2.0**12, 2.0**10]),
    ],
}


@slow_in_graph_mode
@pytest.mark.parametrize("name", ["own_scales", "own_scales_retried"])
def test_the_same_scales_move_on_all_ranks(job, mode, name):
    """Whichever network overflowed on which rank."""
    for records in job(name, mode):
        names = ("overflow", "loss_scale", "scales")
        assert [tuple(record[key].tolist() for key in names) for record in records] == OWN_SCALES[name]


@pytest.mark.slow
def test_all_find_the_same_scales(job):
    """Those that do for the batches of all ranks, or none if one has none."""
    for *records, different in job("found", "graph"):
        assert "loss_scale.max_loss_scale: 1048576.0 on rank 0, 2097152.0 on rank 1" in str(different["error"])
        assert len(records) == 2
        for record in records:
            assert record["found"].tolist() == [2.0**12, 2.0**9]
            assert "found no loss scale of network 1" in str(record["error"])
            assert record["scales"].tolist() == record["found"].tolist()


@pytest.mark.parametrize("parallel_mode", ["semi_auto_parallel", *slow("auto_parallel")])
def test_with_sharded_weights_ranks_agree_on_overflows_and_the_rest_is_refused(job, parallel_mode):
    for cells, refused, manual in job(parallel_mode, "graph"):
        assert cells["agrees"].tolist() == [True] * 3
        for name in ("gradient_accumulation_steps", "ema_decay", "weighted"):
            assert f"'{name}' is not supported with parallel_mode='{parallel_mode}'" in str(refused[name])
        assert "pipeline stages are not supported, but pipeline_stages is 2" in str(refused["pipeline_stages"])
        assert "Return the loss divided by its weight" in str(refused["weighted"])
        assert len(manual["weights"]) == 2
        for message in manual["weights"]:
            assert (
                f"'ManualStep.end', the argument 'weight' is not supported with parallel_mode='{parallel_mode}'"
                in message
            )


def test_ranks_can_agree_on_nothing_without_communication():
    network = Linear()
    with pytest.raises(RuntimeError, match=r"'gradients_reduced' is True, but .*init\(\).*msrun.*train alone"):
        ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), gradients_reduced=True)


@pytest.mark.parametrize("value", [1, None, "", ["group"]])
def test_gradients_reduced_is_a_bool_or_a_group(value):
    network = Linear()
    with pytest.raises(TypeError, match="'gradients_reduced' must be True, False or the name of a comm"):
        ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), gradients_reduced=value)


@pytest.mark.parametrize("parallel_mode", ["data_parallel", "hybrid_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize(
    "cell_class", [ScaledTrainOneStepCell, SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell]
)
def test_without_communication_a_cell_is_refused(cell_class, parallel_mode):
    network = Linear()
    optimizer = nn.SGD(network.trainable_params())
    arguments = (network, optimizer) if cell_class is ScaledTrainOneStepCell else ([network], [optimizer])
    mindspore.set_auto_parallel_context(parallel_mode=parallel_mode)
    try:
        with pytest.raises(RuntimeError) as error:
            cell_class(*arguments)
    finally:
        mindspore.reset_auto_parallel_context()
    for words in (cell_class.__name__, parallel_mode, "mindspore.communication.init()", "msrun", "stand_alone"):
        assert words in str(error.value)
