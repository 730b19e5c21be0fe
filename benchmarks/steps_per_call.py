"""
Measures a step of LeNet-5 in graph mode if the host starts several with one call: MindSpore's unscaled cell and that of
ms_lossscale, each in a compiled loop.

    python benchmarks/steps_per_call.py

Prints a table in GitHub's Markdown.
"""

import functools
import statistics

from base import on_cpu, take_turns
from common.output import markdown_table
from mindspore import Tensor, nn
from sides import lenet, momentum
from tqdm import tqdm

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


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


def step_of(is_stock, count):
    """Returns a function that makes so many steps in one call."""
    network, batch = lenet()
    its = nn.TrainOneStepCell if is_stock else functools.partial(ScaledTrainOneStepCell, loss_scale=DynamicLossScale())
    loop = Loop(its(network, momentum(network)), is_stock).set_train()
    return lambda: loop(*batch, Tensor(count))


if __name__ == "__main__":
    on_cpu()
    rows = []
    for count in tqdm((1, 8, 64), unit="case"):
        sides = {is_stock: functools.partial(step_of, is_stock, count) for is_stock in (True, False)}
        measured = take_turns(sides, rounds=7)["seconds"]
        stock, scaled = (1000 * statistics.median(measured[is_stock]) / count for is_stock in (True, False))
        rows.append((count, f"{stock:.2f} ms", f"{scaled:.2f} ms", f"{scaled / stock:.2f}"))
    print(markdown_table(["steps per call", "stock", "ms_lossscale", "ratio"], rows), end="")
