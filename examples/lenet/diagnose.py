"""
Trains LeNet-5 in float16 with gradients that underflow, finds out where and which loss scale helps, and trains again.

    python examples/lenet/diagnose.py

Writes the reports as tables and plots, and the test accuracies, to the output folder, see --output.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# To import the modules that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
from common.data import add_data_argument, test_dataset, train_dataset
from common.lenet5 import accuracy
from common.options import positive_int, seed_int
from common.output import counted, replacing, written_scale
from tqdm import tqdm
from weighted_training import add_weighted_arguments, load_or_exit, make_folder_or_exit, train

from ms_lossscale import (
    FixedLossScale,
    ScheduledLossScale,
    advise_float32,
    build_train_network,
    profile_activations,
    profile_gradients,
)


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train LeNet-5 in float16 without a loss scale, with a loss of such small weight that gradients "
        "underflow, and show where. Then train it with the loss scale that the reports recommend, and with one for "
        "each stage of training."
    )
    add = parser.add_argument
    add_data_argument(parser)
    add("--output", metavar="DIR", default="output/diagnose", help="folder for the results (default: %(default)s)")
    add("--seed", type=seed_int, default=0, help="seed of the weights and of the digits' order (default: %(default)s)")
    add("--epochs", type=positive_int, default=5, help="epochs of each training (default: %(default)s)")
    add(
        "--profile-batches",
        type=positive_int,
        default=8,
        metavar="N",
        help="number of batches for each report (default: %(default)s)",
    )
    add_weighted_arguments(parser)
    return parser


class Diagnosis:
    """Runs the trainings, and makes the reports."""

    def __init__(self, args, digits, bar):
        self._args, self._digits, self._bar = args, digits, bar
        batches = train_dataset(digits, args.batch_size, args.seed, 0).create_tuple_iterator(num_epochs=1)
        self._batches = [batch for _, batch in zip(range(args.profile_batches), batches)]

    def train(self, title, loss_scale, before_epoch=None):
        """Trains with the loss scale. Returns a line with the test accuracy."""
        self._bar.set_description(title.split(",")[0])
        cells = []

        def make_cell(*parts):
            cells.append(build_train_network(*parts, level="O3", loss_scale_manager=loss_scale))
            return cells[0]

        network = train(make_cell, self._args, self._digits, self._args.seed, self._bar, before_epoch)
        share = accuracy(network, test_dataset(self._digits))
        skipped = counted(cells[0].counters()["skipped_steps"], "step", "steps")
        return f"{share:6.1%}  {title}{f'; {skipped} skipped' if cells[0].loss_scale.drop_overflow_update else ''}\n"

    def gradients(self, cell, loss_scale):
        """Returns the report at the largest scale, from the given one down, at which no gradient overflows."""
        report = profile_gradients(cell, self._batches, loss_scale=loss_scale)
        if report.total.non_finite:
            return self.gradients(cell, loss_scale / 4)
        return report

    def activations(self, cell):
        return profile_activations(cell, self._batches)

    def advice(self, cell):
        return advise_float32(cell, self._batches[:1])


def schedule_of(reports):
    """Returns a schedule with the smaller of the two scales that the reports before and after a step recommend."""
    steps, scales = zip(*((report.step, report.recommended_loss_scale) for report in reports))
    smaller = [min(pair) for pair in zip(scales, scales[1:] + scales[-1:])]
    return ScheduledLossScale([*steps[1:], steps[-1] + 1], smaller)


def diagnose(args, digits, folder, bar):
    diagnosis = Diagnosis(args, digits, bar)
    reports, advice, stages = {}, [], []

    def look_inside(cell):
        if not reports:
            reports["activations"] = diagnosis.activations(cell)
            reports["gradients"] = diagnosis.gradients(cell, 1.0)
            # Again at the scale that it recommends, where no gradient underflows on the way.
            scale = reports["gradients"].recommended_loss_scale
            reports["gradients_scaled"] = diagnosis.gradients(cell, scale)
            advice.append(diagnosis.advice(cell))

    def look_at_stage(cell):
        stages.append(diagnosis.gradients(cell, cell.get_loss_scale()))

    table = diagnosis.train("no loss scale", None, look_inside)
    scale = reports["gradients_scaled"].recommended_loss_scale
    title = f"fixed scale, {written_scale(scale)} as recommended before training"
    table += diagnosis.train(title, FixedLossScale(scale), look_at_stage)
    schedule = schedule_of(stages)
    starts = [0, *schedule.milestone[:-1]]
    stages_of_scale = itertools.groupby(zip(schedule.loss_scales, starts), key=lambda stage: stage[0])
    changes = [next(of_one_scale) for _, of_one_scale in stages_of_scale]
    scales = ", ".join(f"{written_scale(value)} from step {step}" for value, step in changes)
    table += diagnosis.train(f"scheduled scale, {scales}", schedule)

    for name, report in reports.items():
        report.to_csv(folder / f"{name}.csv")
        report.to_json(folder / f"{name}.json")
        report.plot(folder / f"{name}.png")
    with replacing(folder / "accuracy.txt") as part:
        part.write_text(table)
    return reports, advice[0], table


def main():
    parser = make_parser()
    args = parser.parse_args()
    digits, steps = load_or_exit(parser, args)
    if steps < args.profile_batches:
        parser.error(
            f"argument --profile-batches: {args.profile_batches} are more than the {steps} batches of "
            f"{args.batch_size} digits that there are"
        )
    folder = make_folder_or_exit(parser, args)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    with tqdm(total=3 * args.epochs * steps, unit="step", dynamic_ncols=True) as bar:
        reports, advice, table = diagnose(args, digits, folder, bar)

    print("== Before training, in float16 without a loss scale: the values inside\n")
    print(reports["activations"])
    print("\n== The gradients that come out of that\n")
    print(reports["gradients"])
    print(f"\n== The same, computed at loss scale {written_scale(reports['gradients_scaled'].loss_scale)}\n")
    print(reports["gradients_scaled"])
    print(f"\n== Test accuracy after {counted(args.epochs, 'epoch', 'epochs')} in float16\n\n{table}", end="")
    print("\n== Does a cell need float32? (examples/diagnosis/advise.py has networks with cells that do.)\n")
    print(advice)
    print(f"\nWrote the reports as .csv, .json and .png, and accuracy.txt, to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
