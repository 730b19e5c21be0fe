"""
Measures a step of LeNet-5 in graph mode if the host starts several with one call: MindSpore's unscaled cell and that of
ms_lossscale, each in a compiled loop.

    python benchmarks/steps_per_call.py

Prints a table in GitHub's Markdown.
"""

import argparse
import statistics
import sys
import time

import before_mindspore  # noqa: F401
import mindspore
from common.output import markdown_table
from mindspore import Tensor, nn
from networks import small_convolutions
from tqdm import tqdm

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

STEPS_PER_CALL = (1, 8, 64)
ROUNDS, STEPS_IN_A_ROUND = 7, 64


class Loop(nn.Cell):
    """Makes a number of steps of a training cell in one call, and returns the last loss."""

    def __init__(self, cell, returns_loss):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.returns_loss = returns_loss

    def construct(self, images, labels, count):
        # A loop's variables must exist before it, in the same shape.
        loss = images.sum()
        while count > 0:
            output = self.cell(images, labels)
            loss = output if self.returns_loss else output[0]
            count = count - 1
        return loss


def make_sides():
    """Returns the loops of both sides, and a batch."""
    sides = {}
    for name in ("stock", "ms_lossscale"):
        network, batch = small_convolutions()
        optimizer = nn.Momentum(network.trainable_params(), learning_rate=1e-4, momentum=0.9)
        if name == "stock":
            sides[name] = Loop(nn.TrainOneStepCell(network, optimizer), returns_loss=True).set_train()
        else:
            cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale())
            sides[name] = Loop(cell, returns_loss=False).set_train()
    return sides, batch


def seconds_of_a_step(loop, batch, count):
    """Measures one round."""
    steps, start = Tensor(count), time.perf_counter()
    for _ in range(STEPS_IN_A_ROUND // count):
        loss = loop(*batch, steps)
    loss.asnumpy()
    return (time.perf_counter() - start) / STEPS_IN_A_ROUND


def main():
    argparse.ArgumentParser(description="Measure a step in graph mode if one call makes several.").parse_args()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    sides, batch = make_sides()
    rows = []
    for count in tqdm(STEPS_PER_CALL, unit="case", dynamic_ncols=True):
        measured = {name: [] for name in sides}
        # The first round compiles.
        for i in range(ROUNDS + 1):
            for name, loop in sides.items():
                seconds = seconds_of_a_step(loop, batch, count)
                if i:
                    measured[name].append(seconds)
        stock, scaled = (1000 * statistics.median(seconds) for seconds in measured.values())
        rows.append((count, f"{stock:.2f} ms", f"{scaled:.2f} ms", f"{scaled / stock:.2f}"))
    print(markdown_table(["steps per call", "stock", "ms_lossscale", "ratio"], rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
