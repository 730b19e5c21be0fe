"""Why the cells watch the memory of their Parameters: MindSpore's fault in ten lines. Fails once it is mended."""

import pytest
from support.python_process import run_python

# A program of its own: MindSpore 2.7.0 uses the memory that it has freed, and aborts when it ends.
PROGRAM = """
import mindspore
from mindspore import Parameter, Tensor, nn, ops


class Counter(nn.Cell):
    def __init__(self):
        super().__init__()
        self.value = Parameter(Tensor(0.0, mindspore.float32), name="value")

    def construct(self, x):
        return self.count(x)

    def count(self, x):
        if x > 0.0:
            ops.assign_add(self.value, x)
        return x


mindspore.set_context(mode=mindspore.GRAPH_MODE)
counter, one = Counter(), Tensor(1.0, mindspore.float32)
counter(one)
mindspore.load_param_into_net(counter, {"value": Parameter(Tensor(10.0, mindspore.float32), name="value")})
counter(one)
print("value", float(counter.value.asnumpy()), flush=True)
"""


@pytest.mark.slow
def test_a_compiled_branch_goes_on_with_the_memory_that_loading_has_replaced(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    assert "value 10.0" in run_python(script, cwd=tmp_path).stdout
