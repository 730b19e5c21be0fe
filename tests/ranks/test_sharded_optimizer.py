"""
Ranks that share the optimizer's state: cells with a ShardedOptimizer beside cells with the plain optimizer, as the
scenarios of `sharded_training.py` train both, compared bit for bit; and their checkpoints.
"""

import itertools
import json

import mindspore
import numpy as np
import pytest
from conftest import MODES, nightly, slow, slow_in_graph_mode, slow_in_pynative_mode
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim
from support import sharded_training as scenarios
from support.networks import LinearWithBias, batch
from support.python_process import check_msrun, skip_with_older_mindspore
from support.ranks_program import JOBS, SCRIPT, written
from support.sharded_training import CALLS, OVERFLOWS, SAVED, STEEP, HalfMlp, file_of
from support.training import same_bits, state, weights

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, ShardedOptimizer, merge_shards

COMPARED = pytest.mark.parametrize(
    ("mode", "name", "ranks"),
    [
        ("graph", "sharded_one_network", 2),
        *slow(
            *(("graph", name, 2) for name in ("sharded_cycle", "sharded_resumed", "sharded_merged")),
            *(("pynative", name, 2) for name in ("sharded_one_network", "sharded_simultaneous", "sharded_alternating")),
        ),
        *nightly(
            *(("pynative", name, 2) for name in ("sharded_cycle", "sharded_resumed", "sharded_merged")),
            *(("graph", name, 2) for name in ("sharded_simultaneous", "sharded_alternating")),
            *itertools.product(MODES, ("sharded_one_network", "sharded_merged"), (4,)),
        ),
    ],
    indirect=["mode"],
)
GOES_ON = ("sharded_resumed", "sharded_merged")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function that gives for each rank the records of a scenario, by "plain" and "sharded"; each job runs once."""
    results, saved_in = {}, tmp_path_factory.mktemp("saved")

    def of(name, mode, ranks=2):
        if (name, mode) != ("sharded_one_network", "graph") or ranks > 2:
            skip_with_older_mindspore()
        its = next(job for job in JOBS if job.ranks == ranks and f"{name}/{mode}" in job.scenarios)
        if its not in results:
            for scenario, its_mode in (each.split("/") for each in its.scenarios):
                if scenario in (*GOES_ON, "sharded_refused"):
                    of("sharded_cycle", its_mode)
            folder = tmp_path_factory.mktemp("ranks")
            results[its] = None
            check_msrun(ranks, SCRIPT, folder, *its.scenarios, cwd=saved_in)
            results[its] = [written(folder / f"rank_{rank}.npz") for rank in range(ranks)]
        if results[its] is None:
            pytest.fail("its job has failed, as the first test that needed it shows")
        return [[by_cell(record) for record in scenarios[f"{name}/{mode}"]] for scenarios in results[its]]

    of.saved_in = saved_in
    return of


def by_cell(record):
    parted = {}
    for path, value in record.items():
        cell, _, name = path.partition("/")
        parted.setdefault(cell, {})[name] = value
    return parted


def saved(record):
    """What a checkpoint of the cell would hold."""
    return {name: Tensor(value) for name, value in record.items() if not name.startswith(("returned", "counters"))}


def merged(records):
    return {name: value.asnumpy() for name, value in merge_shards([saved(each["sharded"]) for each in records]).items()}


def gathered(name):
    return "accumulation." in name


@COMPARED
def test_weights_and_all_else_are_those_of_the_plain_optimizer(job, mode, name, ranks):
    """Bit for bit after each of 20 calls on each rank: weights, scales, counters, averages, norms, what is returned."""
    for records in job(name, mode, ranks):
        assert len(records) == 2 + CALLS - (SAVED + 1 if name in GOES_ON else 0)
        for record in records:
            plain, shared = record["plain"], record["sharded"]
            same = plain.keys() & shared.keys()
            # The rest is the state of the elements, of which each rank has its part.
            assert {each.split(".")[0] for each in plain.keys() - same} <= ELEMENTS | {"optimizer_0", "optimizer_1"}
            assert not {each for each in same if not same_bits(plain[each], shared[each])}


ELEMENTS = {"adam_m", "adam_v", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


@COMPARED
def test_merged_they_are_the_checkpoint_of_the_plain_optimizer(job, mode, name, ranks):
    """Bit for bit, with its names, shapes and dtypes; within a cycle, the ranks' mean, and any one's flag."""
    for records in zip(*job(name, mode, ranks)):
        whole, expected = merged(records), {key: value.asnumpy() for key, value in saved(records[0]["plain"]).items()}
        assert whole.keys() == expected.keys()
        different = {key for key in expected if not same_bits(expected[key], whole[key])}
        assert {key for key in different if not gathered(key)} == set()
        for key in different:
            of_ranks = [record["plain"][key] for record in records]
            is_flag = of_ranks[0].dtype == bool
            wanted = np.any(of_ranks, axis=0) if is_flag else np.mean(of_ranks, axis=0)
            np.testing.assert_array_equal(whole[key], wanted)


@COMPARED
def test_each_rank_has_its_part_of_the_state(job, mode, name, ranks):
    """In bytes: one nth of what the plain optimizer has, and less than an element for each weight and rank besides."""
    for records in job(name, mode, ranks):
        plain, shared = records[-1]["plain"], records[-1]["sharded"]
        states = [each for each in plain if each not in shared]
        parts = {each: shared[name_of_part(each)] for each in states}
        assert sum(part.nbytes for part in parts.values()) == sum(4 * -(-plain[each].size // ranks) for each in states)
        for each, part in parts.items():
            assert part.nbytes * ranks < plain[each].nbytes + 4 * ranks


def name_of_part(state):
    head, dot, rest = state.partition(".")
    return f"{head}.shard.{rest}" if head.startswith("optimizer_") else f"shard.{head}{dot}{rest}"


@pytest.mark.parametrize("mode", ["graph", *slow("pynative")], indirect=True)
def test_what_happened_in_these_steps(job, mode):
    """Overflows were on one rank only, or a step was skipped on all; the rest was clipped."""
    for records in job("sharded_one_network", mode):
        overflows = [bool(record["sharded"]["returned 1"]) for record in records[1:-1]]
        assert [call for call in OVERFLOWS if not overflows[call]] == []
        # At the first scale that is small enough such a batch is fine.
        assert {call for call in range(CALLS) if overflows[call]} <= OVERFLOWS.keys() | STEEP.keys()
        assert not same_bits(records[-1]["sharded"]["hidden.weight"], records[0]["sharded"]["hidden.weight"])


@slow_in_pynative_mode
def test_steps_were_tried_again(job, mode):
    for records in job("sharded_simultaneous", mode):
        counters = json.loads(str(records[-2]["sharded"]["counters"]))
        assert min(counters["retries"], counters["skipped_steps"], counters["applied_steps"]) > 0


@slow_in_graph_mode
def test_resumed_it_is_as_if_nothing_had_been(job, mode):
    """Each rank in a new process with its own part, within a cycle."""
    for records, expected in zip(job("sharded_resumed", mode), job("sharded_cycle", mode)):
        for record, wanted in zip(records[1:], expected[SAVED + 2 :]):
            assert not {
                each for each in wanted["sharded"] if not same_bits(record["sharded"][each], wanted["sharded"][each])
            }


@slow_in_graph_mode
def test_a_plain_cell_goes_on_with_merged_files(job, mode):
    """In this process, by either function, within a cycle, from which the partial cycle is flushed."""
    job("sharded_cycle", mode)
    whole = merge_shards([job.saved_in / file_of("sharded", rank, int(MODES[mode])) for rank in range(2)])
    cells = [scenarios.cycle_cell(scenarios.plain) for _ in range(2)]
    assert cells[0].load_state_dict(whole) == ([], [])
    assert mindspore.load_param_into_net(cells[1], whole, strict_load=True)[0] == []
    for cell in cells:
        assert not {each for each, value in state(cell).items() if not same_bits(value, whole[each].asnumpy())}
        before = cell.counters()["applied_steps"]
        cell.flush()
        assert cell.counters()["applied_steps"] == before + 1
    assert all(map(np.array_equal, weights(cells[0].network), weights(cells[1].network)))


@slow_in_graph_mode
def test_float16_weights_have_float32_masters(job, mode):
    """Trained as float32 weights that the forward rounds; a merged checkpoint has them beside the weights."""
    by_rank = job("sharded_half", mode)
    for records in zip(*by_rank):
        control, whole = records[0]["plain"], merged(records)
        for name, half in records[0]["sharded"].items():
            if half.dtype == np.float16:
                assert same_bits(half, control[name].astype(np.float16))
                assert same_bits(whole[f"master.{name}"], control[name])
        assert whole.keys() - control.keys() == {f"master.{name}" for name, its in whole.items() if its.dtype == "f2"}
        for name in control:
            if name.startswith("adam_") or "loss_scale" in name or "step_counters" in name:
                assert same_bits(whole[name], control[name]), name
    assert not same_bits(whole["master.hidden.weight"], whole["hidden.weight"].astype(np.float32))


@slow_in_graph_mode
def test_a_part_of_another_rank_is_refused_and_nothing_loaded(job, mode):
    for rank, records in enumerate(job("sharded_refused", mode)):
        errors = [str(record["error"][""]) for record in records]
        for error in errors[:2]:
            assert f"here that of rank {rank} of 2, but got one that is that of rank {1 - rank} of 2" in error
        assert bool(records[0]["untouched"][""])
        assert "splits weights over 1, and the cell has 2" in errors[2]
        assert "'hidden.weight' is layerwise_parallel" in errors[3]
        assert "must be 'data_parallel', but got 'semi_auto_parallel'" in errors[4]


@pytest.fixture
def parts(job):
    return [saved(records[-1]["sharded"]) for records in job("sharded_one_network", "graph")]


def edited(part, **values):
    return {**part, **{name.replace("__", "."): value for name, value in values.items()}}


def without(part, name):
    return {key: value for key, value in part.items() if key != name}


FAULTS = {
    "checkpoints' must not be empty": lambda a, b, other: [],
    "rank 1 is missing": lambda a, b, other: [a],
    "rank 0 is missing": lambda a, b, other: [b],
    "rank 0 comes 2 times": lambda a, b, other: [a, b, a],
    "checkpoints[0] is that of rank 1, checkpoints[1] is that of rank 0": lambda a, b, other: [b, a],
    "checkpoints[1] holds no part of a sharded optimizer": lambda a, b, other: [a, other],
    "checkpoints[0] is empty": lambda a, b, other: [{}],
    "checkpoints[1] is empty": lambda a, b, other: [a, {}],
    "checkpoints[0] lacks adam_lost.w": lambda a, b, other: [a, {**b, "adam_lost.w": b["factor"]}],
    "checkpoints[1] lacks shard.adam_v.output.weight": lambda a, b, other: [
        a,
        without(b, "shard.adam_v.output.weight"),
    ],
    "checkpoints[0] lacks output.weight": lambda a, b, other: [without(each, "output.weight") for each in (a, b)],
    "'shard.adam_m.hidden.weight' of the shape (8,), but it has (7,)": lambda a, b, other: [
        a,
        {**b, "shard.adam_m.hidden.weight": b["shard.adam_m.hidden.weight"][:7]},
    ],
    "checkpoints[1] has another 'hidden.weight' than checkpoints[0]": lambda a, b, other: [
        a,
        {**b, "hidden.weight": b["hidden.weight"] + 1},
    ],
    "checkpoints[1] has another 'step_counters.applied_steps'": lambda a, b, other: [
        a,
        {**b, "step_counters.applied_steps": b["step_counters.applied_steps"] + 1},
    ],
    "checkpoints[1] is damaged: its 'shard.layout' can't be read": lambda a, b, other: [
        a,
        {**b, "shard.layout": b["shard.layout"][:30]},
    ],
    "checkpoints[1] (part.ckpt) can't be read": lambda a, b, other: [a, "part.ckpt"],
    "checkpoints[1] (nothing.ckpt) can't be read": lambda a, b, other: [a, "nothing.ckpt"],
    "Check the file name, or save it again. Nothing was merged.": lambda a, b, other: [a, "nothing.ckpt"],
}


def test_what_can_not_be_merged_is_named(parts, tmp_path):
    mindspore.save_checkpoint([{"name": name, "data": value} for name, value in parts[1].items()], "whole.ckpt")
    whole = (tmp_path / "whole.ckpt").read_bytes()
    (tmp_path / "part.ckpt").write_bytes(whole[: len(whole) // 2])
    other = saved(state(ScaledTrainOneStepCell(network := HalfMlp(), nn.Adam(network.trainable_params()))))
    for words, of in FAULTS.items():
        with pytest.raises(ValueError) as error:
            merge_shards(of(*parts, other))
        assert words in str(error.value)
    for wrong in ("rank_0.ckpt", 3, [3], [{"name": 3}], [{3: parts[0]["factor"]}]):
        with pytest.raises(TypeError, match="merge_shards"):
            merge_shards(wrong)
    assert merge_shards([parts[0], "whole.ckpt"]).keys() == merge_shards(parts).keys()


def test_a_cell_of_one_rank_has_no_use_for_masters_and_refuses_parts(parts):
    network = HalfMlp()
    optimizer = scenarios.adam_in_groups(scenarios.plain, network.trainable_params())
    cell = ScaledTrainOneStepCell(network, optimizer, scenarios.scale(), clip_norm=0.5, ema_decay=0.75)
    whole = merge_shards(parts)
    master = Parameter(whole["hidden.weight"], name="master.hidden.weight")
    before = state(cell)
    for wrong in (parts[0], {**whole, "master.nothing": master}):
        with pytest.raises(RuntimeError, match="unexpected"):
            cell.load_state_dict(wrong)
        assert not {name for name, value in state(cell).items() if not same_bits(value, before[name])}
    assert cell.load_state_dict({**whole, "master.hidden.weight": master}) == ([], [])
    assert same_bits(network.hidden.asnumpy(), whole["hidden.weight"].asnumpy())


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
    first, second = map(state, cells)
    assert first.keys() == second.keys()
    assert not {name for name in first if not same_bits(first[name], second[name])}
    inner = optimizers[1].optimizer
    assert inner.parameters[0] is optimizers[1].parameters[0] is networks[1].weight
    for name in ("learning_rate", "global_step", "dynamic_lr", "is_group_lr"):
        assert getattr(optimizers[1], name) is getattr(inner, name)


class Came(nn.Cell):
    """By its name an optimizer of a toolkit, with factors of whole weights."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.parameters = parameters

    def construct(self, gradients):
        return gradients


class Holding(nn.Cell):
    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer, self.parameters = optimizer, optimizer.parameters

    def construct(self, gradients):
        return self.optimizer(gradients)


REFUSED = {
    "Lamb looks at whole weights": lambda shards: Holding(nn.Lamb(shards, 0.1)),
    "LARS looks at whole weights": lambda shards: nn.LARS(nn.Momentum(shards, 0.1, 0.9)),
    "AdaFactor looks at whole weights": lambda shards: nn.AdaFactor(shards),
    "Came looks at whole weights": lambda shards: Came(tuple(shards)),
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
    for parameters in ([], [{"params": []}], [{"lr": 0.1}]):
        with pytest.raises(ValueError, match="must not be empty"):
            ShardedOptimizer(parameters, nn.Adam)
    for arguments in ((weights, nn.Adam(weights)), (weights, 3), ([3], nn.Adam), (weights, lambda shards: 3)):
        with pytest.raises(TypeError, match="ShardedOptimizer"):
            ShardedOptimizer(*arguments)
    for error, make in ((TypeError, nn.Lamb), (ValueError, lambda shards: nn.Adam(shards, learning_rate=-1.0))):
        with pytest.raises(error, match=r"'optimizer' must be a function .* raised: .*learning.rate.* Pass lambda"):
            ShardedOptimizer(weights, make)
    for parameters in (None, network, weights[0], {"params": weights}):
        with pytest.raises(TypeError, match=r"'parameters' must be a list .*but got .*Pass network\.trainable_params"):
            ShardedOptimizer(parameters, nn.Adam)
    for parameters in (None, network.get_parameters()):
        with pytest.raises(TypeError, match="'params' of a group must be a list of Parameters, but got"):
            ShardedOptimizer([{"params": parameters}], nn.Adam)
    assert isinstance(ShardedOptimizer(weights, lambda shards: optim.NAdam(shards)).optimizer, optim.NAdam)
