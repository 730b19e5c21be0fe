"""Why a cell that has made steps has `load_state_dict`. Fails once MindSpore has mended it."""

import mindspore
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype


class Counter(nn.Cell):
    def __init__(self):
        super().__init__()
        self.value = Parameter(Tensor(0.0, mstype.float32), name="value")

    def construct(self, x):
        return self.count(x)

    def count(self, x):
        if x > 0.0:
            ops.assign_add(self.value, x)
        return x


def test_a_compiled_branch_goes_on_with_the_memory_that_loading_has_replaced():
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        counter, one = Counter(), Tensor(1.0, mstype.float32)
        counter(one)
        mindspore.load_param_into_net(counter, {"value": Parameter(Tensor(10.0, mstype.float32), name="value")})
        counter(one)
        assert counter.value.asnumpy() == 10.0
    finally:
        mindspore.set_context(mode=before)
