"""
An observer: a network that keeps the least value it has seen of each of four classes. Of three it sees none, so that they
stay at the largest float32. Nothing overflows, each step is to be applied; but a sum of these values overflows float32,
and sets the status register if it is taken between its clear and its reading.

    python run.py --numpy --saturation observer.py [--mode pynative]      # prints a line of JSON for each step
"""

import argparse
import json
import os

import cells
import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
parser.add_argument("--largest", type=float, default=float(np.finfo(np.float32).max), help="what the bounds begin with")
args = parser.parse_args()
ON_NPU = "DRY_ASCEND_SOC" in os.environ
mindspore.set_seed(1)
mindspore.set_context(mode=mindspore.GRAPH_MODE if args.mode == "graph" else mindspore.PYNATIVE_MODE)
mindspore.set_device("Ascend" if ON_NPU else "CPU")


class Observed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.network, self.loss = cells.Mlp(), cells.Squares()
        self.least = Parameter(Tensor(np.full(4, args.largest, np.float32)), name="least", requires_grad=False)
        self.mask = Tensor(np.array([1, 0, 0, 0], np.float32))
        self.rest = Tensor(np.array([0, args.largest, args.largest, args.largest], np.float32))

    def construct(self, x, target):
        y = self.network(x)
        seen = ops.mean(ops.stop_gradient(ops.cast(y, mstype.float32))) * self.mask + self.rest
        ops.assign(self.least, ops.minimum(self.least, seen))
        return self.loss(y, target)


network = Observed()
cell = ScaledTrainOneStepCell(
    network, nn.Momentum(network.trainable_params(), 0.01, 0.9), DynamicLossScale(1024.0, 2, 100)
).set_train()
for i in range(4):
    output = [each.asnumpy().tolist() for each in cell(cells.X, cells.TARGET)]
    line = {"step": i, "output": output, "least": network.least.asnumpy().tolist()}
    if ON_NPU:
        import dry_ascend

        line["register"] = list(dry_ascend.register_log)
        dry_ascend.register_log.clear()
    print(json.dumps(line), flush=True)
os._exit(0)
