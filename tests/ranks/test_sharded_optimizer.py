"""Ranks that share the optimizer's state: cells with a ShardedOptimizer beside cells with the plain optimizer, as the
scenarios of `sharded_training.py` train both, compared bit for bit; and their checkpoints."""

import json
import re

import mindspore
import numpy as np
import pytest
from conftest import MODES, nightly, quick_in_graph_mode, slow
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim
from support import sharded_training as scenarios
from support.networks import LinearWithBias, batch
from support.ranks_program import folder_of, records_of
from support.sharded_training import CALLS, SAVED
from support.training import changed, same_bits, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, ShardedOptimizer, merge_shards

COMPARED = pytest.mark.parametrize(
    "name, mode, ranks",
    [
        ("sharded_one_network", "graph", 2),
        *slow(
            *(("sharded_one_network", "pynative", 2), ("sharded_resumed", "graph", 2), ("sharded_merged", "graph", 2)),
            *((name, mode, 2) for name in ("sharded_cycle", "sharded_alternating") for mode in MODES),
        ),
        *nightly(
            *((name, "pynative", 2) for name in ("sharded_resumed", "sharded_merged")),
            *(("sharded_one_network", mode, 4) for mode in MODES),
            *[("sharded_merged", "graph", 4)],
        ),
    ],
)
# What each rank has a part of.
ELEMENTS = ("adam_m", "adam_v", "exp_avg", "max_exp_avg")
in_slow_job = pytest.mark.parametrize("mode", slow(*MODES))
on_checkpoints = pytest.mark.parametrize("mode", [*slow("graph"), *nightly("pynative")])


@pytest.fixture
def shared(tmp_path_factory, worker_id):  # The folder of all jobs, and of the checkpoints that they saved.
    return folder_of(tmp_path_factory, worker_id)


@pytest.fixture
def job(shared):  # A function that gives for each rank the records of a scenario: pairs of a plain and a sharded one.
    return lambda *of: [list(zip(records[::2], records[1::2])) for records in records_of(shared, *of)]


def saved(record):  # What a checkpoint of the cell would hold.
    return {name: Tensor(value) for name, value in record.items() if not name.startswith(("returned", "counters"))}


def merged(records):
    return {name: value.asnumpy() for name, value in merge_shards([saved(each[1]) for each in records]).items()}


def name_of_part(state):
    head, dot, rest = state.partition(".")
    return f"{head}.shard.{rest}" if head.startswith("optimizer_") else f"shard.{head}{dot}{rest}"


@COMPARED
def test_weights_and_all_else_are_those_of_the_plain_optimizer(job, name, mode, ranks):
    """Bit for bit after each of 20 calls on each rank: weights, scales, counters, averages, what is returned. Of the
    optimizer's state, each rank has one nth, and less than an element for each weight besides."""
    for records in job(name, mode, ranks):
        calls = len(CALLS) - (SAVED + 1 if name in ("sharded_resumed", "sharded_merged") else 0)
        assert len(records) == 2 + calls
        for plain, shared in records:
            same = plain.keys() & shared.keys()
            assert not {each for each in same if not same_bits(plain[each], shared[each])}
            assert {each for each in same if each.startswith(ELEMENTS)} == set()
            for each in plain.keys() - same:
                assert each.startswith((*ELEMENTS, "optimizer_"))
                assert shared[name_of_part(each)].nbytes == 4 * -(-plain[each].size // ranks)


@COMPARED
def test_merged_they_are_the_checkpoint_of_the_plain_optimizer(job, name, mode, ranks):
    """Bit for bit, with its names, shapes and dtypes; within a cycle, the ranks' mean, and any one's flag."""
    for records in zip(*job(name, mode, ranks)):
        whole, expected = merged(records), {key: value.asnumpy() for key, value in saved(records[0][0]).items()}
        for key in changed(expected, whole):
            assert "accumulation." in key
            of_ranks = [record[0][key] for record in records]
            wanted = np.any(of_ranks, axis=0) if of_ranks[0].dtype == bool else np.mean(of_ranks, axis=0)
            np.testing.assert_array_equal(whole[key], wanted)


def test_what_happened_in_these_steps(job):
    """Where a batch overflowed on one rank, all skipped the step; and one for its norm."""
    for records in job("sharded_one_network", "graph"):
        for (_, record), kinds in zip(records[1:], CALLS):
            # At the first scale that is small enough a steep batch is fine.
            assert bool(record["returned 1"]) == (not {*"xh"}.isdisjoint(kinds)) or "s" in kinds
        assert not same_bits(records[-1][1]["hidden.weight"], records[0][1]["hidden.weight"])


@on_checkpoints
def test_resumed_it_is_as_if_nothing_had_been(job, mode):
    """Each rank in a new process with its own part, within a cycle. Some calls were tried again."""
    for records, expected in zip(job("sharded_resumed", mode), job("sharded_cycle", mode)):
        assert json.loads(str(expected[-1][1]["counters"]))["retries"] > 0
        for record, wanted in zip(records[1:], expected[SAVED + 2 :]):
            assert changed(record[1], wanted[1]) == set()


@in_slow_job
def test_merged_within_a_cycle_of_which_ranks_have_shares_of_their_own(shared, mode):
    """Training goes on as if nothing had been, up to rounding."""
    by_rank = [
        [
            {re.sub(r"critic_train\.(critic\.|rows\.)?", "", name): value for name, value in record.items()}
            for record in records
        ]
        for records in records_of(shared, "sharded_shares", mode)
    ]
    for before, expected, resumed in zip(*(by_rank[0][i::3] for i in range(3))):
        assert not same_bits(expected["weight"], before["weight"])
        for name in ("weight", "bias", "loss_scale.scale_value", "step_counters.applied_steps"):
            np.testing.assert_allclose(resumed[name], expected[name], rtol=1e-5)
        assert expected["step_counters.applied_steps"] == 1 and not resumed["accumulation.sum_of_weights"].any()
    # The ranks have different shares.
    for shares in zip(*(records[::3] for records in by_rank)):
        assert len({its["accumulation.sum_of_weights"].item() for its in shares}) == 2


@in_slow_job
def test_float16_weights_have_float32_masters(job, mode):
    """Trained as float32 weights that the forward rounds; a merged checkpoint has them beside the weights."""
    by_rank = job("sharded_half", mode)
    for records in zip(*by_rank):
        control, whole = records[0][0], merged(records)
        for name, half in records[0][1].items():
            if half.dtype == np.float16:
                assert same_bits(half, control[name].astype(np.float16))
                assert same_bits(whole[f"master.{name}"], control[name])
        assert whole.keys() - control.keys() == {f"master.{name}" for name, its in whole.items() if its.dtype == "f2"}
        for name in control:
            if name.startswith("adam_") or "loss_scale" in name or "step_counters" in name:
                assert same_bits(whole[name], control[name]), name
    assert not same_bits(whole["master.hidden.weight"], whole["hidden.weight"].astype(np.float32))


@on_checkpoints
def test_a_part_of_another_rank_is_refused_and_nothing_loaded(shared, mode):
    for rank, (before, after, last) in enumerate(records_of(shared, "sharded_refused", mode)):
        assert changed(before, after) == set()
        errors = last["errors"].tolist()
        for error in errors[:2]:
            assert f"here that of rank {rank} of 2, but got one that is that of rank {1 - rank} of 2" in error
        assert "splits weights over 1, and the cell has 2" in errors[2]
        assert "'hidden.weight' is layerwise_parallel" in errors[3]
        assert "must be 'data_parallel', but got 'semi_auto_parallel'" in errors[4]


@pytest.fixture
def parts(job):
    return [saved(records[-1][1]) for records in job("sharded_one_network", "graph")]


def with_one_more(part, name):
    return {**part, name: part[name] + 1}


def without(part, name):
    return {key: value for key, value in part.items() if key != name}


def summing(part):  # A part of a training in which the ranks sum their gradients.
    layout = json.loads(part["shard.layout"].asnumpy().tobytes())
    text = json.dumps({**layout, "averages": False}).encode()
    return {**part, "shard.layout": Tensor(np.frombuffer(text, np.uint8))}


# What the error must say, and what is no set of parts, given that of both ranks.
FAULTS = {
    "in order, but holds none.": lambda a, b: [],
    "all 2 ranks, in order, but holds rank 1 of 2.": lambda a, b: [b],
    "holds rank 0 of 2, rank 1 of 2, rank 0 of 2.": lambda a, b: [a, b, a],
    "holds rank 1 of 2, rank 0 of 2.": lambda a, b: [b, a],
    "checkpoints[1] holds no part of a sharded optimizer": lambda a, b: [a, without(b, "shard.layout")],
    "checkpoints[1] lacks shard.adam_v.output.weight": lambda a, b: [a, without(b, "shard.adam_v.output.weight")],
    "checkpoints[1] has another 'step_counters.app": lambda a, b: [a, with_one_more(b, "step_counters.applied_steps")],
    "checkpoints[1] has other weights, or other state": lambda a, b: [a, summing(b)],
    "checkpoints[1] is damaged: its 'shard.layout' can't": lambda a, b: [a, with_one_more(b, "shard.layout")],
    "part.ckpt": lambda a, b: [a, "part.ckpt"],
    "nothing.ckpt": lambda a, b: [a, "nothing.ckpt"],
}


def test_what_can_not_be_merged_is_named(parts, tmp_path):
    mindspore.save_checkpoint([{"name": name, "data": value} for name, value in parts[1].items()], "whole.ckpt")
    whole = (tmp_path / "whole.ckpt").read_bytes()
    (tmp_path / "part.ckpt").write_bytes(whole[: len(whole) // 2])
    for words, of in FAULTS.items():
        with pytest.raises(ValueError) as error:
            merge_shards(of(*parts))
        assert words in str(error.value)
    for wrong in ("rank_0.ckpt", [3], [{"name": 3}]):
        with pytest.raises(TypeError, match="merge_shards"):
            merge_shards(wrong)
    assert merge_shards([parts[0], tmp_path / "whole.ckpt"]).keys() == merge_shards(parts).keys()

    # Within a cycle, what a rank has of summed gradients is not a share of a known size.
    cycle = {"accumulation.hidden.weight": parts[0]["hidden.weight"]}
    both = [{**part, **cycle, "accumulation.sum_of_weights": Tensor(2.0 * i + 1)} for i, part in enumerate(parts)]
    assert merge_shards(both)["accumulation.sum_of_weights"].asnumpy() == 2
    with pytest.raises(ValueError, match="within an accumulation cycle by ranks that sum their gradients"):
        merge_shards(list(map(summing, both)))


def test_a_cell_of_one_rank_has_no_use_for_masters_and_refuses_parts(parts):
    cell = scenarios.one_network_cell(scenarios.plain)
    network = cell.network
    whole = merge_shards(parts)
    master = Parameter(whole["hidden.weight"], name="master.hidden.weight")
    before = state(cell)
    for wrong in (parts[0], {**whole, "master.nothing": master}):
        with pytest.raises(RuntimeError, match="unexpected"):
            cell.load_state_dict(wrong)
        assert changed(before, state(cell)) == set()
    assert cell.load_state_dict({**whole, "master.hidden.weight": master}) == ([], [])
    assert same_bits(network.hidden.asnumpy(), whole["hidden.weight"].asnumpy())


@quick_in_graph_mode
def test_with_one_rank_it_is_the_plain_optimizer(mode):
    """It gets the very weights, in the form in which they were passed; callbacks find in it what they ask for."""
    got = []

    def make(parameters):
        got.append(parameters)
        return nn.Momentum(parameters, nn.ExponentialDecayLR(0.1, 0.5, 1), 0.9)

    networks = LinearWithBias(), LinearWithBias()
    groups = [[{"params": [its.weight], "weight_decay": 0.5}, {"params": [its.bias]}] for its in networks]
    optimizers = make(groups[0]), ShardedOptimizer(groups[1], make)
    assert got == groups
    cells = [
        ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10)).set_train()
        for network, optimizer in zip(networks, optimizers)
    ]
    for seed in range(3):
        for cell in cells:
            cell(*batch(seed))
    assert changed(*map(state, cells)) == set()
    inner = optimizers[1].optimizer
    assert inner.parameters[0] is optimizers[1].parameters[0] is networks[1].weight
    for name in ("learning_rate", "global_step", "dynamic_lr", "is_group_lr"):
        assert getattr(optimizers[1], name) is getattr(inner, name)
    # MindSpore does not list the learning rates of experimental optimizers.
    first, second = (scenarios.cycle_cell(make) for make in (scenarios.plain, ShardedOptimizer))
    assert state(first).keys() == state(second).keys()


class Came(nn.Adam):
    """By its name an optimizer of a toolkit, with factors of whole weights."""


# What the error must say, and what makes such an optimizer.
REFUSED = {
    "LARS looks at whole weights": lambda shards: nn.LARS(nn.Momentum(shards, 0.1, 0.9)),
    "AdaFactor looks at whole weights": nn.AdaFactor,
    "Came looks at whole weights": Came,
    "the Adam leaves out or adds: bias": lambda shards: nn.Adam(shards[:1]),
}


def test_what_can_not_be_split_is_refused():
    network = LinearWithBias()
    weights = network.trainable_params()
    for words, make in REFUSED.items():
        with pytest.raises(ValueError) as error:
            ShardedOptimizer(weights, make)
        assert words in str(error.value)
    with pytest.raises(ValueError, match="grad_centralization=True"):
        ShardedOptimizer([{"params": weights, "grad_centralization": True}], nn.Adam)
    for arguments in ((weights, nn.Adam(weights)), (weights, lambda shards: 3)):
        with pytest.raises(TypeError, match="'ShardedOptimizer', the argument 'optimizer' must be a"):
            ShardedOptimizer(*arguments)
    for parameters in (network, {"params": weights}, [{"params": None}]):
        with pytest.raises(TypeError, match=r"'parameters' must be a list .*but got .*Pass network\.trainable_params"):
            ShardedOptimizer(parameters, nn.Adam)
    assert isinstance(ShardedOptimizer(weights, lambda shards: optim.NAdam(shards)).optimizer, optim.NAdam)
