"""
Trains the same LeNet-5 in float16 with and without loss scaling, and prints a table of the test accuracies.

    python examples/lenet/compare.py

The loss has a small weight, like a term of a larger loss, so that float16 gradients underflow unless it is scaled.
"""

import argparse
import csv
import functools
import os
import statistics
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# To import the modules that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
from common.data import add_data_argument, test_dataset
from common.lenet5 import accuracy
from common.options import positive_float, positive_int, seed_int
from common.output import markdown_table, replacing
from mindspore import FixedLossScaleManager, amp
from tqdm import tqdm
from weighted_training import add_weighted_arguments, load_or_exit, make_folder_or_exit, train

from ms_lossscale import DynamicLossScale, FixedLossScale, build_train_network


def float32(args, *parts):
    return build_train_network(*parts, level="O0", loss_scale_manager=None)


def unscaled(args, *parts):
    return build_train_network(*parts, level="O3", loss_scale_manager=None)


def stock(args, *parts):
    manager = FixedLossScaleManager(1024, drop_overflow_update=False)
    return amp.build_train_network(*parts, level="O3", loss_scale_manager=manager)


def fixed(args, *parts):
    return build_train_network(*parts, level="O3", loss_scale_manager=FixedLossScale(args.scale))


def dynamic(args, *parts):
    return build_train_network(*parts, level="O3", loss_scale_manager=DynamicLossScale())


RECIPES = {
    "(a) float32, the reference": float32,
    "(b) float16, no loss scale": unscaled,
    "(c) float16, stock fixed scale 1024, always update": stock,
    "(d) float16, ms_lossscale fixed": fixed,
    "(e) float16, ms_lossscale dynamic": dynamic,
}


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train the same LeNet-5 in float16 with and without loss scaling, and print a table of the test "
        "accuracies. The loss is multiplied by a small weight, so that float16 gradients underflow."
    )
    add = parser.add_argument
    add_data_argument(parser)
    add("--output", metavar="DIR", default="output/compare", help="folder for the table (default: %(default)s)")
    add(
        "--seeds",
        type=seed_int,
        nargs="+",
        metavar="SEED",
        default=[0, 1, 2],
        help="train once with each seed (default: 0 1 2)",
    )
    add("--epochs", type=positive_int, default=8, help="epochs of each training (default: %(default)s)")
    add_weighted_arguments(parser)
    add("--scale", type=positive_float, default=2.0**14, help="the fixed scale of (d) (default: %(default)g)")
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    digits, steps_per_epoch = load_or_exit(parser, args)
    folder = make_folder_or_exit(parser, args)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")

    results = {}
    steps = len(RECIPES) * len(args.seeds) * args.epochs * steps_per_epoch
    with tqdm(total=steps, unit="step", dynamic_ncols=True) as bar:
        for name, make_cell in RECIPES.items():
            results[name] = []
            for seed in args.seeds:
                bar.set_description(f"{name[:3]} seed {seed}")
                network = train(functools.partial(make_cell, args), args, digits, seed, bar)
                share = accuracy(network, test_dataset(digits))
                results[name].append(share)
                bar.write(f"{name}, seed {seed}: {share:.1%}", file=sys.stderr)

    table = markdown(results, args.seeds)
    with replacing(folder / "compare.md") as part:
        part.write_text(table)
    with replacing(folder / "compare.csv") as part, open(part, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("recipe", "seed", "accuracy"))
        writer.writerows((name, *row) for name, values in results.items() for row in zip(args.seeds, values))
    print(table, end="")


def markdown(results, seeds):
    """Returns the table in GitHub's Markdown."""
    header = ["Test accuracy in %", "mean", "against (a)", *(f"seed {seed}" for seed in seeds)]
    rows = []
    reference = statistics.mean(next(iter(results.values())))
    for name, values in results.items():
        mean = statistics.mean(values)
        difference = 100 * (mean - reference)
        rows.append([name, f"{100 * mean:.1f}", f"{difference:+.1f}", *(f"{100 * value:.1f}" for value in values)])
    return markdown_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
