"""
A program for test_names.py: trains both cells for several networks, also from checkpoints, in a process of its own.

    resume_several_networks.py MODE BEGIN END FOLDER

trains the calls BEGIN to END - 1, from FOLDER/CELL_BEGIN.ckpt if BEGIN > 0, and writes FOLDER/CELL_END.ckpt.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# For the package `support`, as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, SimultaneousTrainOneStepCell
from support.gan_networks import NETWORK_INPUTS, gan_batch, generator_and_discriminator, two_losses, two_optimizers

# For each call the losses that overflow, before and after the place where the training is interrupted.
OVERFLOWS = [(), (0,), (), (1,), (), ()]
INTERRUPTED_AT = 3


def make_simultaneous():
    networks = generator_and_discriminator()
    return SimultaneousTrainOneStepCell(
        two_losses(*networks),
        two_optimizers(*networks),
        DynamicLossScale(2.0**10, scale_window=2),
        network_inputs=NETWORK_INPUTS,
        ema_decay=0.5,
    ).set_train()


def make_alternating():
    networks = generator_and_discriminator()
    return AlternatingTrainOneStepCell(
        two_losses(*networks),
        two_optimizers(*networks),
        DynamicLossScale(2.0**10, scale_window=2),
        # Network 1 takes part in the calls 2, 4 and 6; the interruption is between two of its turns.
        every=(1, 2),
        network_inputs=NETWORK_INPUTS,
        ema_decay=0.5,
    ).set_train()


CELLS = {"simultaneous": make_simultaneous, "alternating": make_alternating}


def train(cell, begin, end):
    for call in range(begin, end):
        cell(*gan_batch(seed=call, overflow_in=OVERFLOWS[call]))


def main(mode, begin, end, folder):
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    begin, end = int(begin), int(end)
    for name, make in CELLS.items():
        cell = make()
        if begin:
            not_loaded, _ = mindspore.load_param_into_net(
                cell, mindspore.load_checkpoint(f"{folder}/{name}_{begin}.ckpt"), strict_load=True
            )
            assert not not_loaded, not_loaded
        train(cell, begin, end)
        mindspore.save_checkpoint(cell, f"{folder}/{name}_{end}.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
