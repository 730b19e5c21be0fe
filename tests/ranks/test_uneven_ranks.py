"""
Ranks whose batches differ: in their numbers of tokens, or in that one of them alone has a high loss, a large gradient
or NaN. All must do what one process does that sees all of it, which NumPy tells, and stay equal bit for bit.
"""

import numpy as np
import pytest
from conftest import slow
from mindspore import Tensor
from support import uneven_ranks as scenarios
from support.python_process import check_msrun, skip_with_older_mindspore
from support.ranks_program import JOBS, SCRIPT, written
from support.sloped_networks import LEARNING_RATE
from support.token_networks import LEARNING_RATE as RATE_OF_TOKENS
from support.token_networks import batch, clipped, gradient, loss_of
from support.training import changed, same_bits
from support.uneven_ranks import CLIP_NORM, MANUAL_CALLS, START, TOKENS, tokens

from ms_lossscale import merge_shards


@pytest.fixture(params=["graph", *slow("pynative")])
def mode(request):
    """The mode of the job."""
    return request.param


only_slow = pytest.mark.parametrize("mode", slow("graph", "pynative"), indirect=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function that gives for each rank the records of a scenario. The job that has it runs once."""
    results = {}

    def of(name, mode):
        skip_with_older_mindspore()
        its = next(job for job in JOBS if f"{name}/{mode}" in job.scenarios)
        if its not in results:
            folder = tmp_path_factory.mktemp("ranks")
            results[its] = None
            check_msrun(its.ranks, SCRIPT, folder, *its.scenarios, cwd=folder)
            results[its] = [written(folder / f"rank_{rank}.npz") for rank in range(its.ranks)]
        if results[its] is None:
            pytest.fail("its job has failed, as the first test that needed it shows")
        return [scenarios[f"{name}/{mode}"] for scenarios in results[its]]

    return of


def different(first, second):
    """The names of what differs between two ranks, but for what each has for itself."""
    own = ("moving_mean", "moving_variance", "overflowed", "loss_not_finite")
    return {name for name in changed(first, second) if not name.endswith(own)}


def check_weighted(by_rank):
    """Each step is that of one batch with the tokens of both ranks, and of all calls of a cycle."""
    records = [iter(its) for its in by_rank]
    for steps, counts in TOKENS.items():
        first, second = (next(its)["weight"] for its in records)
        assert same_bits(first, second)
        before, batches = first.astype(np.float64), []
        for call in range(len(counts) + 1):
            values = [next(its) for its in records]
            is_flushed = call == len(counts)
            if not is_flushed:
                its_batches = [tokens(rank, call, steps) for rank in range(2)]
                batches += its_batches
                for its, data in zip(values, its_batches):
                    np.testing.assert_allclose(its["loss"], loss_of(before, data), rtol=3e-6)
                    assert not its["overflow"]
            if batches and (is_flushed or (call + 1) % steps == 0):
                grad = gradient(before, batches)
                if steps == 1:
                    assert np.linalg.norm(grad) > CLIP_NORM or not grad.any()
                    grad = clipped(grad, CLIP_NORM) if grad.any() else grad
                np.testing.assert_allclose(values[0]["weight"], before - RATE_OF_TOKENS * grad, rtol=3e-6)
                before, batches = values[0]["weight"].astype(np.float64), []
            assert same_bits(*(its["weight"] for its in values))


def test_means_over_the_tokens_of_all_ranks(job, mode):
    check_weighted(job("weighted_mean", mode))


@only_slow
def test_the_same_where_ranks_sum_their_gradients(job, mode):
    check_weighted(job("weighted_sum", mode))


@only_slow
def test_a_network_without_weights_beside_one_with_them(job, mode):
    """The gradients of its means are averaged, or summed, as `gradients_mean` says."""
    batches = [tokens(rank, 0, 1) for rank in range(2)]
    for records in job("weighted_pair", mode):
        before = records[0]["before"].astype(np.float64)
        mean, of_means = gradient(before, batches), np.mean([gradient(before, [data]) for data in batches], axis=0)
        for record, grad in zip(records, (mean, of_means, mean, 2 * of_means)):
            np.testing.assert_allclose(record["after"], record["before"] - RATE_OF_TOKENS * grad, rtol=3e-6)


class Law:
    """The rule of NormSpike, as its docstring has it, in float64."""

    def __init__(self):
        self.steps, self.mean, self.variance = 0, 0.0, 0.0

    def skips(self, norm):
        """Returns whether it skips a step with this norm, and else observes it."""
        usual = self.mean + scenarios.Z_SCORE * np.sqrt(self.variance)
        if norm > scenarios.MAX_NORM or (self.steps >= scenarios.WINDOW and norm > usual):
            return True
        a, d = 1 / scenarios.WINDOW, norm - self.mean
        if self.steps == 0:
            self.mean = norm
        else:
            self.mean, self.variance = self.mean + a * d, (1 - a) * (self.variance + a * d * d)
        self.steps += 1
        return False


def check_spikes(by_rank, norms):
    """Returns which steps were skipped. All ranks skip those whose common norm is a spike."""
    law, skipped = Law(), []
    for i, norm in enumerate(norms):
        skipped.append(law.skips(norm))
        for records in by_rank:
            assert bool(records[i]["overflow"]) == skipped[-1]
            np.testing.assert_allclose(records[i]["norm_spike.mean"], law.mean, rtol=1e-6)
            np.testing.assert_allclose(records[i]["norm_spike.variance"], law.variance, rtol=1e-5)
            assert records[i]["norm_spike.steps"] == law.steps
        assert different(by_rank[0][i], by_rank[1][i]) <= {"own"}
    return skipped


def reduced(norms, mean=True):
    return [abs(sum(its)) / (2 if mean else 1) for its in norms]


@only_slow
def test_a_spike_is_one_of_the_reduced_gradients(job, mode):
    """Two large gradients in opposite directions are none, and two ordinary ones may be one in sum."""
    by_rank = job("spikes", mode)
    calls, skipped = len(scenarios.SPIKES), [False, False, False, True, True, False]
    assert check_spikes([its[:calls] for its in by_rank], reduced(scenarios.SPIKES)) == skipped
    weight = 1.0
    for record, norms in zip(by_rank[0], scenarios.SPIKES):
        weight -= 0 if record["overflow"] else LEARNING_RATE * sum(norms) / 2 / 2
        np.testing.assert_allclose(record["slopes.weight"], weight, rtol=1e-6)
    assert check_spikes([its[calls:] for its in by_rank], reduced(scenarios.SPIKES, mean=False)) == skipped


@only_slow
def test_a_spike_of_a_ranks_own_weights_skips_the_step_on_all(job, mode):
    """The norm is that of the common weight and of both ranks' own."""
    norms = [np.sqrt(4.0**2 + np.square(own).sum()) for own in scenarios.OWN_GRADIENTS]
    by_rank = job("own_spikes", mode)
    assert check_spikes(by_rank, norms) == [False, False, True, False]
    for rank, records in enumerate(by_rank):
        own = 1 - LEARNING_RATE * sum(its[rank] for its in np.delete(scenarios.OWN_GRADIENTS, 2, axis=0))
        np.testing.assert_allclose(records[-1]["own"], [own, 1.0], rtol=1e-6)


@only_slow
def test_a_spike_with_a_sharded_optimizer_is_one_of_all_parts(job, mode):
    by_rank = job("sharded_spikes", mode)
    sharded = [
        [{name[8:]: value for name, value in record.items() if name.startswith("sharded/")} for record in records]
        for records in by_rank
    ]
    law = Law()
    for i, norm in enumerate(reduced(scenarios.SPIKES)):
        skips = law.skips(norm)
        for records, its in zip(by_rank, sharded):
            assert bool(its[i]["overflow"]) == skips
            np.testing.assert_allclose(its[i]["norm_spike.mean"], law.mean, rtol=1e-6)
            for name in its[i].keys() & {name[6:] for name in records[i] if name.startswith("plain/")}:
                assert same_bits(its[i][name], records[i][f"plain/{name}"]), name
    assert law.steps == 4


@only_slow
def test_cycles_of_sharded_cells_are_merged(job, mode):
    """The mean of the losses, and what any rank saw. With weights only between two cycles."""
    by_rank = job("sharded_cycles", mode)
    parts = [[{name: Tensor(value) for name, value in record.items()} for record in records] for records in by_rank]
    good, bad, *of_weighted = ([records[i] for records in parts] for i in range(len(parts[0])))
    merged = merge_shards(good)
    # The weights are ones, so that the losses are twice the norms.
    assert float(merged["accumulation.sum_of_losses"].asnumpy()) == (2 * 4.0 + 2 * 8.0) / 2
    merged = merge_shards(bad)
    for name in ("overflow", "loss_not_finite", "forward_not_finite"):
        assert bool(merged[f"accumulation.{name}"].asnumpy()), name
        assert not bool(bad[0][f"accumulation.{name}"].asnumpy()) and bool(bad[1][f"accumulation.{name}"].asnumpy())
    assert not bool(merged["accumulation.backs_off"].asnumpy())
    for i in range(2):
        with pytest.raises(ValueError, match="within an accumulation cycle by ranks whose losses have weights"):
            merge_shards(of_weighted[i])
    merged = merge_shards(of_weighted[2])
    assert same_bits(merged["tokens.weight"].asnumpy(), by_rank[0][-1]["tokens.weight"])


def test_a_loss_that_is_high_on_one_rank_skips_the_step_on_all(job, mode):
    """Only counters move in it, and whatever the ranks share stays equal bit for bit."""
    by_rank = job("high_losses", mode)
    calls = len(scenarios.LOSSES)
    for steps, first in ((1, 0), (2, calls + 1)):
        cells = [records[first : first + calls + 1] for records in by_rank]
        skipped = [any(2 * norm > scenarios.HIGHEST for norm in norms) for norms in scenarios.LOSSES]
        if steps == 2:
            # Each cycle has one such call, but for the last.
            skipped = [False, True, False, True, False, False]
        assert not different(cells[0][0], cells[1][0])
        for call, is_skipped in enumerate(skipped, 1):
            values = [records[call] for records in cells]
            assert [bool(its["overflow"]) for its in values] == [is_skipped] * 2
            assert not {name for name in different(*values) if "accumulation." not in name}
            for records in cells:
                before, after = ({k: records[i][k] for k in records[0]} for i in (call - steps, call))
                if is_skipped:
                    # A cycle keeps the scale that it used.
                    assert changed(before, after) - {"accumulation.loss_scale"} == {
                        f"step_counters.{name}"
                        for name in ("skipped_steps", "consecutive_skipped_steps", "skip_reasons")
                    }
                elif call % steps == 0:
                    assert {"slopes.weight", "ema.slopes.weight", "observed"} <= changed(before, after)
        applied = (calls - skipped.count(True)) if steps == 1 else 1
        for records in cells:
            assert float(records[-1]["observed"]) == applied == int(records[-1]["step_counters.applied_steps"])
            assert records[-1]["step_counters.skip_reasons"].tolist() == [2, 0, 0, 0, 0]


# For each step what it used, whether it was skipped, and the scale after it.
BAD_STEPS = {
    "bad_steps": [
        (False, START, START),
        (True, START, START),
        (True, START, START),
        (True, START, START),
        (True, START, START / 2),
        (False, START / 2, START / 2),
    ],
    "bad_cycles": [
        (False, START, START),
        (True, START, START),
        (True, START, START),
        (True, START, START / 2),
        (True, START / 2, START / 4),
        (False, START / 4, START / 4),
        (False, START / 4, START / 4),
    ],
    # A steep batch is tried again at lower scales, unless its cycle is lost. What those attempts lowered stays.
    "bad_steps_retried": [
        (False, START, START),
        (True, START, START),
        (True, START, START),
        (True, START, START),
        (False, START / 4, START / 4),
        (False, START / 4, START / 4),
    ],
    "bad_cycles_retried": [
        (False, START, START),
        (True, START, START),
        (True, START, START),
        (True, START, START / 2),
        (True, START / 4, START / 4),
        (False, START / 4, START / 4),
        (False, START / 4, START / 4),
    ],
}


def check_bad_steps(by_rank, name):
    for i, wanted in enumerate(BAD_STEPS[name]):
        for records in by_rank:
            record = records[i]
            scales = (float(record["loss_scale"]), float(record["loss_scale.scale_value"]))
            assert (bool(record["overflow"]), *scales) == wanted, i
            assert np.isfinite(record["slope.weight"]).all()
            assert np.isfinite(record["slope.moving_mean"]).all()
        assert same_bits(*(records[i]["counters"] for records in by_rank))
        assert not different(*(records[i] for records in by_rank))


def test_nan_on_one_rank_leaves_the_scale_alone_on_all(job, mode):
    """In a cycle they back off if a call overflowed, on any rank, whose own loss was finite."""
    by_rank = job("bad_cycles", mode)
    check_bad_steps(by_rank, "bad_cycles")
    assert [int(records[-1]["of_losses"]) for records in by_rank] == [4, 4]


@only_slow
@pytest.mark.parametrize("name", ["bad_steps", "bad_steps_retried", "bad_cycles_retried"])
def test_so_it_does_in_single_steps_and_with_retries(job, mode, name):
    check_bad_steps(job(name, mode), name)


@only_slow
def test_a_manual_step_whose_gradients_hooks_average(job, mode):
    """Weights, conditions, and losses that are not numbers: all ranks decide alike."""
    by_rank = job("manual", mode)
    start = by_rank[0][0]["tokens.weight"].astype(np.float64)
    batches = [
        [batch(counts[rank], seed=10 * call + rank) for rank in range(2)]
        for call, (counts, _) in enumerate(MANUAL_CALLS)
    ]
    first = start - RATE_OF_TOKENS * gradient(start, batches[0] + batches[1])
    last = first - RATE_OF_TOKENS * gradient(first, batches[6])
    for records in by_rank:
        weights = [record["tokens.weight"] for record in records]
        assert same_bits(weights[0], weights[1])
        np.testing.assert_allclose(weights[2], first, rtol=3e-6)
        # A high loss in the second cycle, NaN in the third.
        assert all(same_bits(weights[2], weights[i]) for i in range(3, 8))
        np.testing.assert_allclose(weights[8], last, rtol=3e-6)
        assert [bool(records[i]["overflow"]) for i in (2, 4, 6)] == [False, True, True]
        assert float(records[-1]["loss_scale.scale_value"]) == START
    assert [records[-1]["step_counters.skip_reasons"].tolist() for records in by_rank] == [[1, 1, 0, 0, 0]] * 2
    for values in zip(*by_rank):
        assert not {name for name in different(*values) if "accumulation." not in name}
