"""Ranks try again together, whichever of them overflowed, and none waits for another."""

import pytest
from support.python_process import skip_with_older_mindspore
from support.rank_programs import printed_by_ranks

pytestmark = pytest.mark.long

PROGRAM = """
import numpy as np
from mindspore import Tensor, nn
from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

from support.retried_networks import LEARNING_RATE, Slope

steps = int(arguments[0])
network = Slope()
optimizer = nn.SGD([network.weight], LEARNING_RATE)
cell = ScaledTrainOneStepCell(
    network, optimizer, DynamicLossScale(2.0**15), max_retries=4, gradient_accumulation_steps=steps
).set_train()
x = Tensor(np.ones((4, 3), np.float32))
# Of this batch rank 0 overflows above 2**15, rank 1 above 2**12; then the other way round; then one is not a number.
for slopes in ((1.0, 8.0), (16.0, 1.0), (1.0, float("nan")), (1.0, 1.0)):
    for _ in range(steps):
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
    rate = 2.0**-10
    weights = [1 - 4.5 * rate, 1 - 13 * rate, 1 - 13 * rate, 1 - 14 * rate]
    expected = [
        f"False {2.0**12} [1, 0, 0, 3] {weights[0]} {steps}",
        f"False {2.0**11} [2, 0, 0, 4] {weights[1]} {2 * steps}",
        f"True {2.0**11} [2, 1, 1, 4] {weights[2]} {2 * steps}",
        f"False {2.0**10} [3, 1, 0, 4] {weights[3]} {3 * steps}",
    ]
    assert printed_by_ranks(PROGRAM, mode, steps, folder=tmp_path) == [expected, expected]
