"""Prints, as JSON, how often MindSpore runs each operator for several cells in graph mode.

It is a separate program, since MindSpore decides whether to save graphs when it compiles the first one."""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

# To find the package `support` when run as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell
from support import gan_networks as gans
from support.networks import weight

# Nodes that only pass values from one operator or branch to the next.
_WIRING = {"Depend", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}
_DEFINITION = re.compile(r"^ *%\d+\(.*?\) = (?:PrimFunc_)?(\w+)\(", re.M)

SMALL, LARGE = 8, 160  # Some steps work on many small tensors as on one; 160 x 160 is more than that.


class Chain(nn.Cell):  # A chain of square matrices.
    def __init__(self, size, count):
        super().__init__()
        self.matrices = mindspore.ParameterTuple([weight(size, size, seed=i, name=f"matrix{i}") for i in range(count)])

    def construct(self, x):
        for matrix in self.matrices:
            x = ops.matmul(x, matrix)
        return x.sum()


def momentum(network):
    return nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)


def operators(folder, cell, *inputs):
    """Compiles the cell for the inputs. Returns a Counter of its operators in all branches."""
    os.environ["MS_DEV_SAVE_GRAPHS_PATH"] = str(folder)
    cell.set_train().compile(*inputs)
    # The final graphs have this name.
    texts = [path.read_text() for path in folder.rglob("graph_build_*.ir")]
    assert texts
    names = Counter(name for text in texts for name in _DEFINITION.findall(text))
    return Counter({name: count for name, count in names.items() if name not in _WIRING})


def added(folder, size, count, **keywords):
    """Returns the operators that the cell has in addition to the stock cell's, for a chain of `count` matrices."""
    x = Tensor(np.ones((2, size), np.float32))
    network, stock = Chain(size, count), Chain(size, count)
    cell = ScaledTrainOneStepCell(network, momentum(network), DynamicLossScale(), **keywords)
    counts = operators(folder / "scaled", cell, x)
    counts.subtract(operators(folder / "stock", nn.TrainOneStepCell(stock, momentum(stock)), x))
    return counts


def gan(folder, losses, **keywords):
    networks = gans.generator_and_discriminator()
    cell = SimultaneousTrainOneStepCell(
        losses(*networks), gans.two_optimizers(*networks), DynamicLossScale(), **keywords
    )
    return operators(folder, cell, *gans.gan_batch(seed=0))


def main():
    # MindSpore decides whether to save graphs when it compiles the first one of a process, if only of one operator.
    os.environ["MS_DEV_SAVE_GRAPHS"] = "2"
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    folder = Path(sys.argv[1])
    cycle = {"clip_norm": 1.0, "ema_decay": 0.9, "gradient_accumulation_steps": 2}
    counts = {
        **{f"{count} large": added(folder / f"{count}", LARGE, count) for count in (4, 5)},
        **{f"{count} large, clip_norm": added(folder / f"{count}c", LARGE, count, clip_norm=1.0) for count in (4, 5)},
        "4 large, clip_norm, ema, cycle": added(folder / "cycle", LARGE, 4, **cycle),
        "4 large, retried": added(folder / "6", LARGE, 4, max_retries=1),
        "GAN, a tuple of losses": gan(folder / "7", gans.GanLosses),
        "GAN, two loss cells": gan(folder / "8", gans.two_losses, network_inputs=gans.NETWORK_INPUTS),
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
