"""A training run that test_resume.py stops in the middle and resumes in a new process:

    python resume_training.py MODE CHECKPOINTS RESULTS

It resumes from each optimizer's checkpoint in the folder CHECKPOINTS, and writes the results to the folder RESULTS."""

import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# To find the package `support` when run as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from mindspore import nn
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
from support.networks import Mlp, batch_for
from support.training import state

FIRST, THEN = 7, 20
# There is one overflow before the stop and one after it. The scale grows every fourth clean step.
OVERFLOWS = [step in (3, 11) for step in range(FIRST + THEN)]


def adam_weight_decay(params):
    schedule = nn.ExponentialDecayLR(0.05, decay_rate=0.9, decay_steps=2)
    return nn.AdamWeightDecay(params, learning_rate=schedule, weight_decay=0.01)


OPTIMIZERS = {"adam_weight_decay": adam_weight_decay, "experimental_adam": lambda params: optim.Adam(params, lr=0.05)}


def make_cell(name):
    network = Mlp()
    optimizer = OPTIMIZERS[name](network.trainable_params())
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10, scale_window=4)).set_train()


def train(cell, first, last):
    """Trains the steps from `first` to before `last`. Returns the loss, overflow and scale of each."""
    reported = []
    for step in range(first, last):
        loss, overflow, loss_scale = cell(*batch_for(OVERFLOWS[step], seed=step))
        reported.append([float(loss), float(overflow), float(loss_scale)])
    return np.array(reported)


def lower_learning_rate(cell):  # Lowers the experimental optimizers' learning rate from outside, as a user's loop may.
    if isinstance(cell.optimizer, optim.Optimizer):
        lr_scheduler.ExponentialLR(cell.optimizer, gamma=0.1).step()


def main(mode, checkpoints, results):
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    for name in OPTIMIZERS:
        cell = make_cell(name)
        saved = mindspore.load_checkpoint(str(Path(checkpoints, f"{name}.ckpt")))
        assert mindspore.load_param_into_net(cell, saved, strict_load=True)[0] == []
        reported = train(cell, FIRST, FIRST + THEN)
        np.savez(Path(results, f"{name}.npz"), reported=reported, **state(cell))


if __name__ == "__main__":
    main(*sys.argv[1:])
