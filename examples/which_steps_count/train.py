"""
Trains a small network in float16, five times on the same batches, of which some hold NaN, some have huge gradients,
and all have another number of characters: with all that says which steps count, without one part of it, and without
any. Draws how it learns.

    python examples/which_steps_count/train.py

The loss has a small weight, like a term of a larger loss, so that float16 gradients underflow unless it is scaled.
"""

import argparse
import csv
import os
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# To import the modules that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
from common.options import positive_float, positive_int, seed_int
from common.output import markdown_table, replacing, written_scale
from matplotlib.figure import Figure
from mindspore import Tensor, amp, nn
from network import NextCharacter, SumOfLosses, TrainedLoss
from text import factor, make_batches
from tqdm import tqdm

from ms_lossscale import DynamicLossScale, NormSpike, ScaledTrainOneStepCell

CALLS = 4
TEST_BATCHES = 24
KEYWORDS = ("backoff_if_loss_not_finite=False", "skip_conditions=[NormSpike(...)]", "weighted=True")
# For each training, which of the three it has.
TRAININGS = {
    "all three": (True, True, True),
    f"without {KEYWORDS[0]}": (False, True, True),
    f"without {KEYWORDS[1]}": (True, False, True),
    f"without {KEYWORDS[2]}": (True, True, False),
    "none of them": (False, False, False),
}


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train a small network in float16 on lines of text of different lengths, some of which are "
        "spoilt by NaN or by a huge weight: with backoff_if_loss_not_finite=False, NormSpike and weighted=True, "
        "without one of them, and without any. Draw the loss on other lines, and the loss scale."
    )
    add = parser.add_argument
    add(
        "--output",
        metavar="DIR",
        default="output/which_steps_count",
        help="folder for the picture and the table (default: %(default)s)",
    )
    add("--steps", type=positive_int, default=240, help=f"steps of {CALLS} batches each (default: %(default)s)")
    add("--seed", type=seed_int, default=0, help="seed of weights and batches (default: %(default)s)")
    add(
        "--loss-weight",
        type=positive_float,
        default=2.0**-19,
        metavar="WEIGHT",
        help="factor of the loss (default: %(default)g)",
    )
    return parser


def make_cell(args, network, keeps_scale, skips_spikes, is_weighted):
    # The usual eps would dominate gradients as small as these.
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 3e-3, eps=1e-16)
    return ScaledTrainOneStepCell(
        TrainedLoss(network, args.loss_weight, is_weighted),
        optimizer,
        DynamicLossScale(backoff_if_loss_not_finite=not keeps_scale),
        gradient_accumulation_steps=CALLS,
        skip_conditions=[NormSpike(z_score=6.0, window=20)] if skips_spikes else [],
        weighted=is_weighted,
    ).set_train()


class Training:
    """A training. `losses` are those on other lines than it learns from, and `scales` its loss scales, at `steps`."""

    def __init__(self, args, keywords, batches, tested, every):
        mindspore.set_seed(args.seed)
        network = amp.auto_mixed_precision(NextCharacter(), "O2")
        self.cell = make_cell(args, network, *keywords)
        self.sum_of_losses = SumOfLosses(network)
        self.steps, self.losses, self.scales = [], [], []
        self._batches, self._tested, self._every = batches, tested, every

    def run(self, steps, bar):
        self._test(0)
        for step in range(1, steps + 1):
            for call in range(CALLS):
                batch = self._batches[(step * CALLS + call) % len(self._batches)]
                self.cell(*batch, Tensor(factor(step, call), mindspore.float32))
            bar.update()
            if step % self._every == 0 or step == steps:
                self._test(step)

    def _test(self, step):
        losses = [self.sum_of_losses(*batch) for batch in self._tested]
        loss = sum(float(its) for its, _ in losses) / sum(float(number) for _, number in losses)
        self.steps.append(step)
        self.losses.append(loss)
        self.scales.append(self.cell.get_loss_scale())


def draw(trainings, path):
    figure = Figure(figsize=(9, 6.4), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for i, (name, training) in enumerate(trainings.items()):
        style = {"color": f"C{i}", "linewidth": 2.4 if i == 0 else 1.4, "linestyle": (0, (4, 4)) if i == 4 else "-"}
        label = f"{name}: {training.losses[-1]:.3f} at the end"
        above.plot(training.steps, training.losses, label=label, **style)
        below.step(training.steps, training.scales, where="post", **style)
    above.set_ylabel("loss per held-out character")
    above.set_yscale("log")
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    below.set_ylabel("loss scale")
    below.set_yscale("log", base=2)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside upper center", ncols=2)
    with replacing(path) as part:
        figure.savefig(part)


def main():
    parser = make_parser()
    args = parser.parse_args()
    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: can't write to the output folder: {error}\n")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    batches, tested = ([tuple(map(Tensor, batch)) for batch in its] for its in make_batches(args.seed))
    every = max(1, args.steps // 30)
    trainings = {}
    with tqdm(total=len(TRAININGS) * args.steps, unit="step", dynamic_ncols=True) as bar:
        for name, keywords in TRAININGS.items():
            bar.set_description(name)
            trainings[name] = Training(args, keywords, batches, tested[:TEST_BATCHES], every)
            trainings[name].run(args.steps, bar)
            bar.write(f"{name}: loss {trainings[name].losses[-1]:.3f}", file=sys.stderr)
    draw(trainings, folder / "curves.png")
    with replacing(folder / "losses.csv") as part, open(part, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("training", "step", "loss", "loss_scale"))
        for name, its in trainings.items():
            writer.writerows((name, *row) for row in zip(its.steps, its.losses, its.scales))
    rows = []
    for name, its in trainings.items():
        reasons = ", ".join(f"{count} {reason}" for reason, count in its.cell.skip_reasons().items() if count)
        applied = its.cell.counters()["applied_steps"]
        rows.append((name, f"{its.losses[-1]:.3f}", written_scale(its.scales[-1]), applied, reasons or "none"))
    print(markdown_table(("", "held-out loss", "loss scale", "applied", "skipped, by reason"), rows), end="")


if __name__ == "__main__":
    sys.exit(main())
