"""What MindSpore does with a branch that only writes, in graph mode (`step/forward_state.py` has such a branch)."""

import mindspore
import pytest
from mindspore import Parameter, Tensor, nn, ops


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
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        cell = cell()
        for _ in range(2):
            cell(Tensor(2.0))
    finally:
        mindspore.set_context(mode=before)
    assert float(cell.kept.asnumpy()) == kept
