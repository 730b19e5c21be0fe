"""
Measures what a batch of a new shape costs in graph mode: time and memory of a small MLP, with and without `set_inputs`.

    python benchmarks/new_shapes.py
"""

import functools
import gc

from base import on_cpu, peak_memory, seconds_of
from common.output import markdown_table
from mindspore import Tensor, nn, ops
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


def cost(make, knows_shapes):
    """Returns the seconds and MiB for each new shape, after the first two."""
    net = nn.SequentialCell(nn.Dense(16, 32), nn.ReLU(), nn.Dense(32, 1))
    cell = make(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.01, 0.9)).set_train()
    if knows_shapes:
        cell.set_inputs(*(Tensor(shape=[None, width], dtype=mstype.float32) for width in (16, 1)))
    sizes = iter(range(1, 3 + SHAPES))

    def step():
        size = next(sizes)
        output = cell(ops.ones((size, 16)), ops.ones((size, 1)))
        return output[0] if isinstance(output, tuple) else output

    seconds_of(step, 2)
    gc.collect()
    memory, seconds = peak_memory(), seconds_of(step, SHAPES)
    return f"{seconds:.3f} s", f"{(peak_memory() - memory) / SHAPES / 2**20:.1f} MiB"


if __name__ == "__main__":
    on_cpu()
    rows = [[name, *cost(make, False), *cost(make, True)] for name, make in tqdm(SIDES.items(), unit="cell")]
    print(markdown_table(["cell", "each new shape", "memory", "each with `set_inputs`", "memory"], rows), end="")
