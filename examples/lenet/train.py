"""
Trains LeNet-5 on handwritten digits in mixed precision, with a loss scale of ms_lossscale.

    python examples/lenet/train.py
    msrun --worker_num=2 --local_worker_num=2 --join=True examples/lenet/train.py

Writes a checkpoint, a CSV of every step and a PNG of the curves to the output folder, see --output. Of several
ranks, which share each batch, the first one does.
"""

import argparse
import json
import os
import signal
import sys
import zlib
from pathlib import Path

# With AVX-512, MindSpore's convolutions on CPU choose a reference kernel that is 10 to 80 times slower. It is read when
# MindSpore is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# For what the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
from common.data import DataError, add_data_argument, load_digits, test_dataset, train_dataset
from common.lenet5 import LeNet5, accuracy
from common.options import (
    add_loss_scale_arguments,
    add_step_arguments,
    complete_loss_scale,
    make_loss_scale,
    positive_float,
    positive_int,
    seed_int,
    step_keywords,
)
from common.output import print_steps, replacing
from common.ranks import finish_ranks, is_first_process, start_ranks
from common.retries import Retries
from history import Step, plot, read_csv, write_csv
from mindspore import Callback, Model, nn
from tqdm import tqdm

from ms_lossscale import (
    FlushAccumulation,
    build_train_network,
)

# Each optimizer, and the learning rate that it begins with unless one is given.
OPTIMIZERS = {
    "adamweightdecay": (nn.AdamWeightDecay, 2e-3),
    "adam": (nn.Adam, 2e-3),
    "momentum": (lambda params, learning_rate: nn.Momentum(params, learning_rate, momentum=0.9), 4e-2),
    "rmsprop": (nn.RMSProp, 2e-3),
    "sgd": (nn.SGD, 2e-1),
}

LEARNING_RATE_DECAY = 0.7  # in each epoch

# Each loss scale, and the options that it takes with their defaults.
LOSS_SCALES = {
    "none": {},
    "fixed": {"scale": 1024.0},
    "fixed-no-drop": {"scale": 1024.0},
    "dynamic": {"scale": 65536.0, "scale_window": 100},
    "scheduled": {"milestone": [250, 500, 1000], "scales": [256.0, 4096.0, 65536.0]},
}

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}


class InputError(Exception):
    """What is wrong with the folder to resume from, or the like, in one line for the user."""


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train LeNet-5 on handwritten digits in mixed precision, with a loss scale of ms_lossscale."
    )
    add = parser.add_argument
    add_data_argument(parser)
    add("--output", metavar="DIR", default="output/lenet", help="folder for the results (default: %(default)s)")
    add("--resume", action="store_true", help="continue from the last whole epoch of the run in the output folder")
    add("--epochs", type=positive_int, default=6, help="epochs in all, resumed ones included (default: %(default)s)")
    add(
        "--batch-size",
        type=positive_int,
        default=32,
        metavar="N",
        help="digits in a step, of all ranks together (default: %(default)s)",
    )
    add("--seed", type=seed_int, default=0, help="of the weights and of the order of the digits (default: %(default)s)")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamweightdecay",
        help="one of {%(choices)s} (default: %(default)s)",
        metavar="NAME",
    )
    rates = ", ".join(f"{rate:g} for {name}" for name, (_, rate) in OPTIMIZERS.items())
    add(
        "--learning-rate",
        type=positive_float,
        metavar="RATE",
        help=f"learning rate to begin with; each epoch multiplies it by {LEARNING_RATE_DECAY} (default: {rates})",
    )
    add(
        "--amp-level",
        choices=("O0", "O1", "O2", "O3", "auto"),
        default="O2",
        help="MindSpore's level of mixed precision: O0 is float32, O1 and auto compute chosen operators in float16, O2 "
        "all but BatchNorm, O3 all (default: %(default)s)",
    )
    add("--mode", choices=MODES, default="graph", help="MindSpore's mode of execution (default: %(default)s)")
    add("--device", choices=("CPU", "GPU", "Ascend"), default="CPU", help="where to train (default: %(default)s)")

    group = parser.add_argument_group("step")
    add_step_arguments(group, ema=0.0, max_retries=0)

    add_loss_scale_arguments(parser.add_argument_group("loss scale"), LOSS_SCALES)
    return parser


def parse_arguments(parser):
    """The arguments, with the defaults that depend on other arguments filled in."""
    args = parser.parse_args()
    complete_loss_scale(parser, args, LOSS_SCALES)
    if args.learning_rate is None:
        args.learning_rate = OPTIMIZERS[args.optimizer][1]
    return args


def join_ranks(args):
    """Joins the other ranks, if there are any."""
    try:
        return start_ranks(args.device, MODES[args.mode], args.seed, args.batch_size)
    except ValueError as error:
        raise InputError(str(error)) from None


def make_cell(args, steps_per_epoch):
    """The network, and the cell that trains it."""
    network = LeNet5()
    make_optimizer, _ = OPTIMIZERS[args.optimizer]
    # Skipped steps don't count for the schedule: it follows the optimizer's own counter, which they leave alone.
    updates_per_epoch = -(-steps_per_epoch // args.accumulate)
    schedule = nn.ExponentialDecayLR(args.learning_rate, LEARNING_RATE_DECAY, updates_per_epoch)
    try:
        loss_scale = make_loss_scale(args)
    except ValueError as error:
        raise InputError(str(error)) from None
    cell = build_train_network(
        network,
        make_optimizer(network.trainable_params(), schedule),
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        level=args.amp_level,
        loss_scale_manager=loss_scale,
        **step_keywords(args),
    )
    return network, cell


class Run:
    """The files of a run in the output folder: a new run removes earlier ones, a resumed one continues them."""

    def __init__(self, args, digits):
        folder = Path(args.output)
        self.checkpoint, self.table, self.curves = (folder / name for name in ("lenet.ckpt", "steps.csv", "curves.png"))
        # What must be the same for a resumed run to end where the uninterrupted one would have.
        names = "batch_size seed optimizer learning_rate amp_level loss_scale scale scale_window milestone scales"
        names += " accumulate clip_norm max_retries ema"
        self._settings = {name: getattr(args, name) for name in names.split()}
        self._settings["data"] = f"{len(digits.train_images)} images, CRC {zlib.crc32(digits.train_images):08x}"

    def begin(self):
        try:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.checkpoint, self.table, self.curves):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"can't write to the output folder: {error}") from None

    def resume(self, cell, steps_per_epoch):
        """Loads the last whole epoch into the cell. Returns its number and the steps up to its end."""
        if not self.checkpoint.is_file():
            raise InputError(f"nothing to resume: {self.checkpoint} does not exist; train without --resume first")
        try:
            parameters = mindspore.load_checkpoint(str(self.checkpoint))
            epoch, settings = int(parameters.pop("epoch")), json.loads(parameters.pop("settings"))
        except (ValueError, RuntimeError, KeyError) as error:
            raise InputError(
                f"{self.checkpoint} is no checkpoint of this program: {str(error).splitlines()[0]}"
            ) from None
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise InputError(
                    f"can't resume: the run in {self.checkpoint.parent} has {name} {settings.get(name)}, not {value}; "
                    f"pass the same, or another --output"
                )
        mindspore.load_param_into_net(cell, parameters, strict_load=True)
        try:
            return epoch, read_csv(self.table, epoch * steps_per_epoch)
        except (OSError, ValueError) as error:
            raise InputError(f"can't resume: {self.table} does not go with the checkpoint: {error}") from None

    def save(self, cell, epoch, steps):
        # The table first: a checkpoint without its steps could not be resumed, a table with too many can.
        write_csv(self.table, steps)
        with replacing(self.checkpoint) as part:
            mindspore.save_checkpoint(
                cell, str(part), append_dict={"epoch": epoch, "settings": json.dumps(self._settings)}
            )


class StepRecorder(Callback):
    """Appends every step, with the loss of its whole batch, to `steps` and shows it in the progress bar."""

    def __init__(self, steps, bar, ranks, cell):
        super().__init__()
        self._steps, self._bar, self._ranks, self._retries = steps, bar, ranks, Retries(cell)
        self._outputs = []

    def on_train_step_end(self, run_context):
        self._outputs.append((*run_context.original_args().net_outputs, self._retries.snapshot()))
        # Reading a value makes the host wait for the device, so not in each step.
        if len(self._outputs) == 16:
            self._read()

    def on_train_epoch_end(self, run_context):
        self._read()

    def _read(self):
        losses = self._ranks.mean([float(loss.asnumpy()) for loss, _, _, _ in self._outputs])
        for loss, (_, overflow, loss_scale, retries) in zip(losses.tolist(), self._outputs):
            values = loss, bool(overflow.asnumpy()), float(loss_scale.asnumpy())
            values += (int(self._retries.since_the_last(retries)[0]),)
            self._steps.append(Step(len(self._steps) + 1, *values))
        recent = [step.loss for step in self._steps[-len(self._outputs) :]]
        skipped = sum(step.overflow for step in self._steps)
        self._bar.set_postfix_str(
            f"loss {sum(recent) / len(recent):.3f}, scale {self._steps[-1].loss_scale:g}, skipped {skipped}",
            refresh=False,
        )
        self._bar.update(len(self._outputs))
        self._outputs.clear()


def interrupt(signum, frame):
    raise KeyboardInterrupt


def train(args):
    digits = load_digits(args.data)
    steps_per_epoch = len(digits.train_images) // args.batch_size
    if steps_per_epoch == 0:
        raise InputError(f"--batch-size {args.batch_size} is more than the {len(digits.train_images)} training images")
    ranks = join_ranks(args)
    network, cell = make_cell(args, steps_per_epoch)
    run = Run(args, digits)
    if args.resume:
        epoch, steps = run.resume(cell, steps_per_epoch)
        if ranks.is_first:
            print(f"Resuming after epoch {epoch} of {args.epochs}")
    else:
        epoch, steps = 0, []
        if ranks.is_first:
            run.begin()

    # A Ctrl-C while a graph runs reaches Python as SIGTERM: MindSpore passes it on so.
    signal.signal(signal.SIGTERM, interrupt)
    model = Model(cell)
    total = max(args.epochs, epoch) * steps_per_epoch
    try:
        with tqdm(
            total=total,
            initial=len(steps),
            unit="step",
            desc="LeNet-5",
            dynamic_ncols=True,
            disable=not ranks.is_first,
        ) as bar:
            recorder = StepRecorder(steps, bar, ranks, cell)
            while epoch < args.epochs:
                dataset = train_dataset(digits, args.batch_size, args.seed, epoch + 1, ranks.share)
                callbacks = [recorder, FlushAccumulation()]
                model.train(epoch + 1, dataset, callbacks, dataset_sink_mode=False, initial_epoch=epoch)
                epoch += 1
                if ranks.is_first:
                    run.save(cell, epoch, steps)
    except KeyboardInterrupt:
        if ranks.is_first:
            cure = f"--resume continues after epoch {epoch}" if epoch else "no epoch was finished, so begin again"
            print(f"Interrupted: {cure}", file=sys.stderr)
        return 130

    finish_ranks()
    if ranks.is_first:
        report(args, digits, network, cell, run, epoch, steps, steps_per_epoch)
    return 0


def report(args, digits, network, cell, run, epoch, steps, steps_per_epoch):
    settings = f"{args.optimizer}, {args.amp_level}, loss scale {args.loss_scale}"
    title = f"LeNet-5, {len(digits.train_images):,} images: {settings}"
    plot(run.curves, steps, title, steps_per_epoch)
    print_steps(cell, epoch, steps_per_epoch, sum(step.overflow for step in steps))
    print(f"Wrote {run.checkpoint}, {run.table.name} and {run.curves.name}")
    share = accuracy(network, test_dataset(digits))
    print(f"Test accuracy: {share:.2%} of {len(digits.test_images):,} images")
    if args.ema:
        with cell.ema_weights():
            share = accuracy(network, test_dataset(digits))
        print(f"With the moving average of the weights: {share:.2%}")


def main():
    parser = make_parser()
    args = parse_arguments(parser)
    try:
        return train(args)
    except (DataError, InputError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n" if is_first_process() else None)


if __name__ == "__main__":
    sys.exit(main())
