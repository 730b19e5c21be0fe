"""Ranks move the same scales of several, whichever network overflowed on which rank, and agree in one message."""

import pytest
from support.python_process import skip_with_older_mindspore
from support.rank_programs import printed_by_ranks

pytestmark = pytest.mark.long

PROGRAM = """
import numpy as np
from mindspore import Tensor, nn
from ms_lossscale import DynamicLossScale, SimultaneousTrainOneStepCell

from support.retried_networks import LEARNING_RATE, Slope

retries = int(arguments[0])
networks = [Slope("first"), Slope("second")]
# The weights of the second are each rank's own, so that nobody else sees their gradients.
networks[1].weight.layerwise_parallel = True
cell = SimultaneousTrainOneStepCell(
    networks,
    [nn.SGD([network.weight], LEARNING_RATE) for network in networks],
    [DynamicLossScale(2.0**15), DynamicLossScale(2.0**14)],
    network_inputs=[(0, 1), (0, 2)],
    max_retries=retries,
).set_train()
x = Tensor(np.ones((4, 3), np.float32))
# For each rank the slopes of both networks: none overflows, the first on rank 0, the second on rank 1, each on one.
for slopes in (((1, 1), (1, 1)), ((4, 1), (1, 1)), ((1, 1), (1, 8)), ((8, 1), (1, 16)), ((1, 1), (1, float("nan")))):
    values = [Tensor(np.float32(slope)) for slope in slopes[rank]]
    _, overflow, scales, _ = cell(x, *values)
    print("end", bool(overflow.asnumpy()), scales.asnumpy().tolist(), cell.get_loss_scale(), flush=True)
"""

EXPECTED = {
    0: [
        (False, [2.0**15, 2.0**14], [2.0**15, 2.0**14]),
        (True, [2.0**15, 2.0**14], [2.0**14, 2.0**14]),
        (True, [2.0**14, 2.0**14], [2.0**14, 2.0**13]),
        (True, [2.0**14, 2.0**13], [2.0**13, 2.0**12]),
        (True, [2.0**13, 2.0**12], [2.0**13, 2.0**11]),
    ],
    4: [
        (False, [2.0**15, 2.0**14], [2.0**15, 2.0**14]),
        (False, [2.0**13, 2.0**14], [2.0**13, 2.0**14]),
        (False, [2.0**13, 2.0**12], [2.0**13, 2.0**12]),
        (False, [2.0**12, 2.0**11], [2.0**12, 2.0**11]),
        (True, [2.0**12, 2.0**11], [2.0**12, 2.0**10]),
    ],
}


@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("retries", EXPECTED)
def test_the_same_scales_move_on_all_ranks(tmp_path, mode, retries):
    skip_with_older_mindspore()
    expected = [f"{overflow} {used} {now}" for overflow, used, now in EXPECTED[retries]]
    assert printed_by_ranks(PROGRAM, mode, retries, folder=tmp_path) == [expected, expected]
