"""Graph mode merges equal constants of a graph, and a network's in-place operators then change all of them: whatever a
network does to its constants, no bit of the step may differ. The package's own are attributes made at construction."""

import ast
import collections
import inspect
from pathlib import Path

import mindspore
import pytest
from conftest import nightly, quick_in_graph_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.in_mode import in_mode
from support.linear_pair import NETWORK_INPUTS, First, Second, arrays, momentum
from support.networks import FEATURES
from support.python_process import skip_with_older_mindspore
from support.training import by_sgd, cell_of, changed, same_bits, state

import ms_lossscale as ls

CALLS = 8


class TamperWithConstants(nn.Cell):
    """Changes constants of each dtype in place, and adds what comes of it to nothing that trains."""

    def construct(self):
        zero, one, minus_one = Tensor(0, mstype.int32), Tensor(1, mstype.int32), Tensor(-1, mstype.int32)
        zero += 1
        one += 2
        minus_one += 3
        long_zero, long_one, long_minus_one = Tensor(0, mstype.int64), Tensor(1, mstype.int64), Tensor(-1, mstype.int64)
        long_zero += 1
        long_one += 2
        long_minus_one += 3
        float_zero, float_one, double_one = Tensor(0.0), Tensor(1.0), Tensor(1.0, mstype.float64)
        float_zero += 2.0
        float_one *= 3.0
        double_one *= 3.0
        half_zero, half_one = Tensor(0.0, mstype.float16), Tensor(1.0, mstype.float16)
        half_zero += 2.0
        half_one *= 3.0
        true, false = Tensor(True), Tensor(False)
        # Not one from the other, which has changed. Graph mode looks through a cast of them.
        true.copy_(one < minus_one)
        false.copy_(one > minus_one)
        zeros, of_weight = Tensor([0] * 8, mstype.int32), Tensor([[0.0]] * FEATURES, mstype.float32)
        zeros += 1
        of_weight += 2.0
        float_zeros = ops.zeros((FEATURES, 1), mstype.float32)
        float_zeros += 2.0
        reported = (of_weight + float_zeros).sum().astype(mstype.int32)
        reported = (
            reported + zero + one + minus_one + zeros.sum() + ops.select(true, zero, ops.select(false, one, zero))
        )
        reported = reported + (long_zero + long_one + long_minus_one).astype(mstype.int32)
        return reported + (float_zero + float_one + double_one + half_zero + half_one).astype(mstype.int32)


class Hostile(nn.Cell):  # A loss with a value that is only reported.
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.tamper = network, TamperWithConstants()

    def construct(self, x, y):
        return self.network(x, y), self.tamper()


class Tame(Hostile):  # The same without in-place operators.
    def construct(self, x, y):
        return self.network(x, y), y


def run(kind, wrap, loss_scale, **keywords):
    first = First()
    networks = [first] if kind == "scaled" else [first, Second(first)]
    optimizers = [momentum([network.weight]) for network in networks]
    keywords.update({} if kind == "scaled" else {"network_inputs": NETWORK_INPUTS}, has_aux=True)
    loss_scale = loss_scale()
    checked = loss_scale.drop_overflow_update
    cell, outputs = cell_of(kind, list(map(wrap, networks)), optimizers, loss_scale, **keywords), []
    for call in range(CALLS):
        # Where nothing is checked, all weights would be NaN afterwards.
        overflows = (call == 3 and checked, call == 5 and checked)
        x0, x1, y = (Tensor(array) for array in arrays(call, overflows))
        outputs.append(cell(x0, y) if kind == "scaled" else cell(x0, x1, y))
    cell.flush()
    reported = [[value.asnumpy() for value in output[:-1]] for output in outputs]
    return state(cell), reported


AVERAGED = {"clip_norm": 0.5, "ema_decay": 0.5}
CASES = {
    "dynamic": (
        lambda: ls.DynamicLossScale(2.0**10, scale_window=2, hysteresis=2),
        {"max_retries": 1, **AVERAGED},
    ),
    "cycle": (lambda: ls.DynamicLossScale(2.0**10, scale_window=2), {"gradient_accumulation_steps": 3, **AVERAGED}),
    "dropping": (
        lambda: ls.DynamicLossScale(2.0**10, scale_window=2, backoff_if_loss_not_finite=False),
        {"gradient_accumulation_steps": 3, "drop_overflowed_calls": True, **AVERAGED},
    ),
    "scheduled": (lambda: ls.ScheduledLossScale([2, 4], [2.0**8, 2.0**10]), {"clip_value": 0.5}),
    "unchecked": (lambda: ls.FixedLossScale(2.0**10, drop_overflow_update=False), {}),
}


@pytest.mark.parametrize(
    "kind, case",
    [
        ("scaled", "dynamic"),
        *slow(("alternating", "cycle"), ("simultaneous", "dynamic"), ("scaled", "scheduled"), ("scaled", "unchecked")),
        *slow(("scaled", "cycle"), ("scaled", "dropping"), ("simultaneous", "dropping")),
        *nightly(("simultaneous", "cycle"), ("alternating", "dynamic"), ("alternating", "dropping")),
    ],
)
@quick_in_graph_mode
def test_a_network_that_changes_constants_changes_no_bit_of_the_step(mode, kind, case):
    skip_with_older_mindspore("MindSpore 2.7 merges no constants")
    loss_scale, keywords = CASES[case]
    hostile, reported = run(kind, Hostile, loss_scale, **keywords)
    tame, expected = run(kind, Tame, loss_scale, **keywords)
    assert not changed(hostile, tame)
    for one, other in zip(reported, expected):
        for value, its in zip(one, other):
            assert same_bits(value, its)


class Flagged(nn.Cell):  # A loss by flags that are constants until they are written.
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0, 2.0]), name="weight")

    def construct(self, x):
        flag, flags = Tensor(False), Tensor([False])
        flag.copy_(x[0] > 0)
        flags.copy_(x[:1] > 0)
        loss = (self.weight * x).sum()
        return ops.select(ops.logical_and(flag, flags), loss, 2 * loss).sum()


@pytest.mark.parametrize("keywords", [{}, *slow({"drop_overflowed_calls": True})])
@quick_in_graph_mode
def test_flags_that_a_network_writes_are_not_those_of_its_calls(mode, keywords):
    skip_with_older_mindspore("MindSpore 2.7 does not differentiate such a network")
    cell = by_sgd(Flagged(), ls.DynamicLossScale(2.0**4), gradient_accumulation_steps=2, **keywords)
    assert not any(bool(cell(Tensor([1.0, 1.0]))[1]) for _ in range(8))
    assert [name for name, value in state(cell).items() if value.dtype == bool and value.any()] == []
    assert cell.counters()["applied_steps"] == 4


def test_mindspore_merges_equal_constants():  # MindSpore's fault, in ten lines.
    class Merged(nn.Cell):
        def __init__(self):
            super().__init__()
            self.count = Parameter(Tensor(5, mstype.int32), name="count", requires_grad=False)

        def construct(self, x):
            n = Tensor(0, mstype.int32)
            n += 1
            ops.assign(self.count, Tensor(0, mstype.int32))
            return x + n

    skip_with_older_mindspore("MindSpore 2.7 does not merge them")
    with in_mode(mindspore.GRAPH_MODE):
        cell = Merged()
        for _ in range(3):
            cell(Tensor(7, mstype.int32))
    # If MindSpore no longer merges them, constants may be written where they are used.
    assert int(cell.count.asnumpy()) == 3


# What graph mode compiles, and functions that only Python can run.
ROOTS = ("construct", "begin", "end", "scale", "unscale", "adjust", "next_scale", "observe")
OF_PYTHON = {"asnumpy", "as_array", "write_in_place"}
MAKES_ONE = {"Tensor", "tensor", "zeros", "ones", "full"}


def called_in(function):
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


def with_literals(sources):
    """Returns the names of the functions that make a Tensor, of those that ROOTS call, or these, and so on."""
    functions = collections.defaultdict(list)
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                functions[node.name].append(called_in(node))
    found, waiting, seen = set(), list(ROOTS), set()
    while waiting:
        name = waiting.pop()
        for calls in functions.get(name, ()) if name not in seen else ():
            if not calls & OF_PYTHON:
                waiting += calls
                found |= {name} if calls & MAKES_ONE else set()
        seen.add(name)
    return found, seen & functions.keys()


def test_no_function_of_a_graph_makes_a_literal_tensor():
    package = Path(ls.__file__).parent
    paths = [path for path in package.rglob("*.py") if path.parts[-2] not in ("diagnosis", "callbacks", "checks")]
    found, seen = with_literals([path.read_text() for path in paths])
    assert found == set()
    # It sees what compiled steps call.
    assert {"can_back_off", "start"} <= seen
    planted = inspect.cleandoc("""
        class Step:
            def __init__(self):
                self.one = Tensor(1)
            def construct(self, x):
                return self.scaled(x) + of_python(x)
            def scaled(self, x):
                return x * Tensor(2.0)
        def of_python(x):
            return Tensor(x.asnumpy())
    """)
    assert with_literals([planted])[0] == {"scaled"}
