"""
A network that keeps the least value it has seen of each of four classes. Of three it sees none, so that these stay at
the largest float32. Nothing overflows, and each step is to be applied; but a sum of these values overflows float32, and
sets the status register if it is taken between the register's clear and its reading. Prints JSON for each step.

    python tools/dry_ascend/run.py --numpy --saturation tools/dry_ascend/observer.py [--mode pynative]
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import dry_ascend
import mindspore
import numpy as np
from dry import cells
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

LARGEST = float(np.finfo(np.float32).max)


class Observed(nn.Cell):
    """A network with a loss, whose forward keeps the least outputs."""

    def __init__(self):
        super().__init__()
        self.network = cells.Layers()
        self.loss = cells.MeanSquare()
        self.least = Parameter(Tensor(np.full(4, LARGEST, np.float32)), name="least", requires_grad=False)
        self.of_first = Tensor(np.array([1, 0, 0, 0], np.float32))
        self.of_others = Tensor(np.array([0, LARGEST, LARGEST, LARGEST], np.float32))

    def construct(self, x, target):
        y = self.network(x)
        mean = ops.mean(ops.stop_gradient(ops.cast(y, mstype.float32)))
        ops.assign(self.least, ops.minimum(self.least, mean * self.of_first + self.of_others))
        return self.loss(y, target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
    mode = parser.parse_args().mode
    mindspore.set_seed(1)
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    mindspore.set_device("Ascend")
    network = Observed()
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(1024.0, 2, 100)).set_train()
    for _ in range(4):
        output = [each.asnumpy().tolist() for each in cell(cells.X, cells.TARGET)]
        register = list(dry_ascend.register_log)
        dry_ascend.register_log.clear()
        print(
            json.dumps({"output": output, "least": network.least.asnumpy().tolist(), "register": register}), flush=True
        )
    os._exit(0)


if __name__ == "__main__":
    main()
