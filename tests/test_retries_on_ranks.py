"""Ranks try again together, whichever of them overflowed, and none waits for another."""

from pathlib import Path

import pytest
from support.python_process import check_msrun, skip_with_older_mindspore

pytestmark = pytest.mark.long

PROGRAM = """
import sys

import mindspore
import numpy as np
from mindspore import Tensor, nn
from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

mode, steps, tests = sys.argv[1:]
sys.path.append(tests)
from support.retried_networks import LEARNING_RATE, Slope

mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
mindspore.communication.init()
mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
rank = mindspore.communication.get_rank()
network = Slope()
optimizer = nn.SGD([network.weight], LEARNING_RATE)
cell = ScaledTrainOneStepCell(
    network, optimizer, DynamicLossScale(2.0**15), max_retries=4, gradient_accumulation_steps=int(steps)
).set_train()
x = Tensor(np.ones((4, 3), np.float32))
# Of this batch rank 0 overflows above 2**15, rank 1 above 2**12; then the other way round; then one is not a number.
for slopes in ((1.0, 8.0), (16.0, 1.0), (1.0, float("nan")), (1.0, 1.0)):
    for _ in range(int(steps)):
        _, overflow, scale = cell(x, Tensor(np.float32(slopes[rank])))
    counters = list(cell.counters().values())
    weight = float(network.weight.asnumpy()[0])
    calls = int(network.calls.asnumpy())
    print("end", bool(overflow.asnumpy()), float(scale.asnumpy()), counters, weight, calls, flush=True)
"""


@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("steps", [1, 2])
def test_all_try_again(tmp_path, mode, steps):
    skip_with_older_mindspore()
    (tmp_path / "program.py").write_text(PROGRAM)
    job = check_msrun(2, "program.py", mode, str(steps), str(Path(__file__).parent), cwd=tmp_path)
    rate = 2.0**-10
    weights = [1 - 4.5 * rate, 1 - 13 * rate, 1 - 13 * rate, 1 - 14 * rate]
    expected = [
        f"end False {2.0**12} [1, 0, 0, 3] {weights[0]} {steps}",
        f"end False {2.0**11} [2, 0, 0, 4] {weights[1]} {2 * steps}",
        f"end True {2.0**11} [2, 1, 1, 4] {weights[2]} {2 * steps}",
        f"end False {2.0**10} [3, 1, 0, 4] {weights[3]} {3 * steps}",
    ]
    for log in job.logs:
        assert [line for line in log.splitlines() if line.startswith("end ")] == expected
