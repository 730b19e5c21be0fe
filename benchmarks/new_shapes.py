"""
Measures what a batch of a new shape costs in graph mode: time and memory of a small MLP, with and without `set_inputs`.

    python benchmarks/new_shapes.py
"""

import argparse
import functools
import gc
import resource
import sys
import time

import before_mindspore  # noqa: F401
import mindspore
import numpy as np
from common.output import markdown_table
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from tqdm import tqdm

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

SHAPES = 12


def scaled(network, optimizer, **keywords):
    return ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(), **keywords)


SIDES = {
    "nn.TrainOneStepCell": nn.TrainOneStepCell,
    "dynamic scale": scaled,
    "with clip_norm and ema_decay": functools.partial(scaled, clip_norm=1.0, ema_decay=0.9),
}


def batch(size):
    return Tensor(np.ones((size, 16), np.float32)), Tensor(np.ones((size, 1), np.float32))


def run(cell, size):
    output = cell(*batch(size))
    (output[0] if isinstance(output, tuple) else output).asnumpy()


def peak_memory():
    """Returns the peak memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def cost(make, knows_shapes):
    """Returns the seconds and MiB for each new shape, after the first two."""
    net = nn.SequentialCell(nn.Dense(16, 32), nn.ReLU(), nn.Dense(32, 1))
    cell = make(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.01, 0.9)).set_train()
    if knows_shapes:
        cell.set_inputs(*(Tensor(shape=[None, width], dtype=mstype.float32) for width in (16, 1)))
    run(cell, 1)
    run(cell, 2)
    gc.collect()
    memory, start = peak_memory(), time.perf_counter()
    for size in range(3, 3 + SHAPES):
        run(cell, size)
    return (time.perf_counter() - start) / SHAPES, (peak_memory() - memory) / SHAPES


def main():
    argparse.ArgumentParser(description="Measure what a batch of a new shape costs in graph mode.").parse_args()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    rows = []
    for name, make in tqdm(SIDES.items(), unit="cell", dynamic_ncols=True):
        row = [name]
        for knows_shapes in (False, True):
            seconds, memory = cost(make, knows_shapes)
            row += [f"{seconds:.3f} s", f"{memory:.1f} MiB"]
        rows.append(row)
    print(markdown_table(["cell", "each new shape", "memory", "each with `set_inputs`", "memory"], rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
