"""What MindSpore does with a branch that only writes, in graph mode (`step/forward_state.py` has such a branch)."""

import os
from pathlib import Path

import mindspore
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.in_mode import in_mode
from support.python_process import run_python


class Saves(nn.Cell):
    """Keeps the weight as it was before its first step; the copy is tied to the input."""

    def __init__(self):
        super().__init__()
        self.steps = Parameter(Tensor(0, mindspore.int32), name="steps", requires_grad=False)
        self.weight = Parameter(Tensor(1.0), name="weight")
        self.kept = Parameter(Tensor(-1.0), name="kept", requires_grad=False)
        self.zero, self.one = Tensor(0, mindspore.int32), Tensor(1, mindspore.int32)

    def construct(self, x):
        x = ops.depend(x, self.save())
        ops.assign(self.weight, self.weight + x)
        ops.assign(self.steps, self.steps + self.one)
        return x


class ConditionComputedWithin(Saves):
    def save(self):
        is_first = ops.equal(self.steps, self.zero)
        if is_first:
            ops.assign(self.kept, self.weight)
        return is_first


class ConditionGiven(Saves):
    def save(self):
        return self.save_if(ops.equal(self.steps, self.zero))

    def save_if(self, is_first):
        if is_first:
            ops.assign(self.kept, self.weight)
        return is_first


@pytest.mark.parametrize("cell, kept", [(ConditionGiven, 1.0), (ConditionComputedWithin, -1.0)])
def test_a_branch_on_a_condition_that_the_method_computes_is_dropped(cell, kept):
    with in_mode(mindspore.GRAPH_MODE):
        cell = cell()
        for _ in range(2):
            cell(Tensor(2.0))
    assert float(cell.kept.asnumpy()) == kept


@pytest.mark.long
def test_mindspore_drops_nothing_of_the_cells_by_mistake(tmp_path):
    """MindSpore can warn of a node that writes and that it dropped; of the branches above MindSpore 2.10 does not."""
    program = (
        "import mindspore; mindspore.set_context(mode=mindspore.GRAPH_MODE)\n"
        "from support.checkpoints_of_releases import CASES, build, train\n"
        "for name in CASES: train(build(name), name, 0, 1)\n"
    )
    tests = Path(__file__).parent
    result = run_python("-c", program, cwd=tmp_path, PYTHONPATH=f"{tests}{os.pathsep}{tests.parent}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "eliminated by mistake" not in result.stdout + result.stderr
