"""Checks what a step costs here."""

import time

import numpy as np
from mindspore import Tensor, nn

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale.selfcheck.claim import check, expect

WIDTH, LAYERS, BATCH = 512, 4, 64
CALLS, ROUNDS = 4, 5
# On CPU it is between 1 and 2, or more if other work disturbs. A step that waits for the host is far above.
AT_MOST = 3.0


def _network():
    layers = [nn.Dense(WIDTH, WIDTH, activation="tanh") for _ in range(LAYERS)]
    return nn.WithLossCell(nn.SequentialCell(*layers), nn.MSELoss())


def _momentum(network):
    return nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9)


def _seconds(cell, batch):
    start = time.perf_counter()
    for _ in range(CALLS):
        output = cell(*batch)
    (output[0] if isinstance(output, tuple) else output).asnumpy()
    return (time.perf_counter() - start) / CALLS


@check()
def a_step_costs_little_more_than_an_unscaled_one(device):
    """A step with dynamic scale, clipping and averages costs at most three times MindSpore's unscaled one."""
    rng = np.random.default_rng(0)
    batch = [Tensor(rng.normal(size=(BATCH, WIDTH)).astype(np.float32)) for _ in range(2)]
    network = _network()
    stock = nn.TrainOneStepCell(network, _momentum(network)).set_train()
    network = _network()
    scaled = ScaledTrainOneStepCell(
        network, _momentum(network), DynamicLossScale(), clip_norm=1.0, ema_decay=0.999
    ).set_train()
    for cell in (stock, scaled):
        _seconds(cell, batch)
    # They take turns. The best time of each was disturbed least by other work.
    times = [(_seconds(stock, batch), _seconds(scaled, batch)) for _ in range(ROUNDS)]
    stock_seconds, seconds = map(min, zip(*times))
    ratio = seconds / stock_seconds
    expect(
        ratio <= AT_MOST,
        f"a step takes {1e3 * seconds:.2f} ms, {ratio:.1f} times the {1e3 * stock_seconds:.2f} ms of the unscaled cell",
    )
