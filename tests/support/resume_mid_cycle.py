"""
A training that can be stopped in the middle of an accumulation cycle, and the script that resumes it in a new process:

    python resume_mid_cycle.py MODE CHECKPOINT FIRST_CALL LAST_CALL RESULT.npz
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# For the package `support`, as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from mindspore import nn, ops

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from support.networks import FEATURES, batch_for, weight

STEPS = 3
# Cycles of three calls: a clean one; one that overflows in its first call; a clean one, in which the scale grows.
OVERFLOWS = (False, False, False, True, False, False, False, False, False)


class Normalised(nn.Cell):
    """A linear model whose inputs are batch-normalised."""

    def __init__(self, seed=0):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.weight = weight(FEATURES, 1, seed=seed, name="weight")

    def construct(self, x, y):
        return ops.square(ops.matmul(self.norm(x), self.weight) - y).mean()


def build(seed=0):
    """A cell that holds everything that there is to resume."""
    network = Normalised(seed)
    optimizer = nn.Adam(network.trainable_params(), learning_rate=nn.ExponentialDecayLR(0.05, 0.5, 1))
    return ScaledTrainOneStepCell(
        network,
        optimizer,
        DynamicLossScale(2.0**10, scale_window=2),
        gradient_accumulation_steps=STEPS,
        clip_norm=0.5,
        ema_decay=0.75,
    ).set_train()


def train(cell, first, last):
    """Makes the calls from `first` to before `last`. Returns what they returned, as arrays."""
    return [
        [np.asarray(value.asnumpy()) for value in cell(*batch_for(OVERFLOWS[call], seed=call))]
        for call in range(first, last)
    ]


def main(mode, checkpoint, first, last, result):
    mindspore.set_context(mode={"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}[mode])
    cell = build(seed=7)
    assert mindspore.load_param_into_net(cell, mindspore.load_checkpoint(checkpoint)) == ([], [])
    train(cell, int(first), int(last))
    np.savez(result, **{name: value.asnumpy() for name, value in cell.parameters_dict().items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
