"""
Trains a DCGAN to draw handwritten digits in mixed precision, with a training cell of ms_lossscale for two networks.

    python examples/gan/train.py
    msrun --worker_num=2 --local_worker_num=2 --join=True examples/gan/train.py

Writes a checkpoint, a CSV of every step, a PNG of the curves and one of drawn digits for each epoch to the output
folder, see --output. At the end a LeNet that was trained on the real digits judges the drawn ones. Of several
ranks, which share each batch, the first one writes, draws and judges.
"""

import argparse
import contextlib
import json
import os
import sys
import zlib
from pathlib import Path

# With AVX-512, MindSpore's convolutions on CPU choose a reference kernel that is 10 to 80 times slower. It is read when
# MindSpore is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# For what the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import judge
import mindspore
import numpy as np
from common.data import DataError, add_data_argument, load_digits, train_dataset
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
from common.output import replacing
from common.ranks import finish_ranks, is_first_process, start_ranks
from mindspore import Tensor, amp, nn
from network import BothLosses, Discriminator, DiscriminatorLoss, Generator, GeneratorLoss
from record import Step, plot, read_csv, save_grid, write_csv
from tqdm import tqdm

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)

# Each loss scale, and the options that it takes with their defaults.
LOSS_SCALES = {
    "none": {},
    "fixed": {"scale": 1024.0},
    "fixed-no-drop": {"scale": 1024.0},
    "dynamic": {"scale": 65536.0, "scale_window": 200},
    "scheduled": {"milestone": [250, 500, 1000], "scales": [256.0, 1024.0, 4096.0]},
}

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}

# Numbers that are drawn for other purposes than each epoch's training come from streams of their own.
TRAINING_NOISE, GRID_NOISE, JUDGED_NOISE = 1, 2, 3

GRID_SIDE = 10
JUDGED_SAMPLES = 1000


class InputError(Exception):
    """What is wrong with the folder to resume from, or the like, in one line for the user."""


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train a DCGAN to draw handwritten digits in mixed precision, with a training cell of ms_lossscale "
        "for two networks."
    )
    add = parser.add_argument
    add_data_argument(parser)
    add("--output", metavar="DIR", default="output/gan", help="folder for the results (default: %(default)s)")
    add("--resume", action="store_true", help="continue from the last whole epoch of the run in the output folder")
    add("--epochs", type=positive_int, default=48, help="epochs in all, resumed ones included (default: %(default)s)")
    add(
        "--batch-size",
        type=positive_int,
        default=32,
        metavar="N",
        help="digits in a step, of all ranks together (default: %(default)s)",
    )
    add("--seed", type=seed_int, default=0, help="of weights, order of the digits and noise (default: %(default)s)")
    add(
        "--filters",
        type=positive_int,
        default=24,
        metavar="N",
        help="channels of the outer hidden layers; each one further in has twice as many (default: %(default)s)",
    )
    add(
        "--latent",
        type=positive_int,
        default=64,
        metavar="N",
        help="random numbers that a digit is drawn from (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=positive_float,
        default=5e-4,
        metavar="RATE",
        help="of both Adam optimizers (default: %(default)s)",
    )
    add(
        "--amp-level",
        choices=("O0", "O1", "O2", "O3", "auto"),
        default="O3",
        help="MindSpore's level of mixed precision: O0 is float32, O1 and auto compute chosen operators in float16, O2 "
        "all but BatchNorm, O3 all (default: %(default)s)",
    )
    add("--mode", choices=MODES, default="graph", help="MindSpore's mode of execution (default: %(default)s)")
    add("--device", choices=("CPU", "GPU", "Ascend"), default="CPU", help="where to train (default: %(default)s)")

    group = parser.add_argument_group("updates")
    add_step_arguments(group, ema=0.99)
    add = group.add_argument
    add(
        "--update",
        choices=("simultaneous", "alternating"),
        default="simultaneous",
        help="simultaneous: both networks from one forward, with one loss scale, and both are updated or none; "
        "alternating: first the discriminator, then the generator sees it updated, each with a loss scale of its own "
        "(default: %(default)s)",
    )
    add(
        "--n-critic",
        type=positive_int,
        metavar="N",
        help="alternating: train the generator in every Nth step only (default: 1)",
    )

    add_loss_scale_arguments(parser.add_argument_group("loss scale"), LOSS_SCALES)
    return parser


def parse_arguments(parser):
    """The arguments, with the defaults that depend on other arguments filled in."""
    args = parser.parse_args()
    complete_loss_scale(parser, args, LOSS_SCALES)
    if args.n_critic is None:
        args.n_critic = 1
    elif args.update == "simultaneous":
        parser.error("argument --n-critic: not used by --update simultaneous, which updates both networks or none")
    return args


def join_ranks(args):
    """Joins the other ranks, if there are any."""
    try:
        return start_ranks(args.device, MODES[args.mode], args.seed, args.batch_size)
    except ValueError as error:
        raise InputError(str(error)) from None


def make_cell(args):
    """The generator, and the cell that trains it and the discriminator on batches of digits and of noise."""
    generator, discriminator = Generator(args.latent, args.filters), Discriminator(args.filters)
    # Both have a layer "norm" or the like: only with a prefix can a checkpoint hold both.
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    generator = amp.auto_mixed_precision(generator, args.amp_level)
    discriminator = amp.auto_mixed_precision(discriminator, args.amp_level)
    optimizers = [
        nn.Adam(network.trainable_params(), args.learning_rate, beta1=0.5) for network in (discriminator, generator)
    ]
    try:
        loss_scale = make_loss_scale(args)
    except ValueError as error:
        raise InputError(str(error)) from None
    keywords = step_keywords(args)
    # Digits are drawn with the average of the generator's weights; nothing needs one of the discriminator's.
    keywords["ema_decay"] = [None, keywords["ema_decay"]]
    if args.update == "simultaneous":
        cell = SimultaneousTrainOneStepCell(BothLosses(generator, discriminator), optimizers, loss_scale, **keywords)
    else:
        cell = AlternatingTrainOneStepCell(
            [DiscriminatorLoss(generator, discriminator), GeneratorLoss(generator, discriminator)],
            optimizers,
            loss_scale,
            every=(1, args.n_critic),
            network_inputs=[(0, 1), (1,)],
            **keywords,
        )
    return generator, cell.set_train()


class Run:
    """The files of a run in the output folder: a new run removes earlier ones, a resumed one continues them."""

    def __init__(self, args, fingerprint):
        self.folder = Path(args.output)
        names = ("gan.ckpt", "steps.csv", "curves.png", "judge.ckpt")
        self.checkpoint, self.table, self.curves, self.judge = (self.folder / name for name in names)
        # What must be the same for a resumed run to end where the uninterrupted one would have.
        names = "batch_size seed filters latent learning_rate accumulate clip_norm ema amp_level update n_critic"
        names += " max_retries loss_scale scale scale_window milestone scales"
        self._settings = {name: getattr(args, name) for name in names.split()}
        self._settings["data"] = fingerprint

    def begin(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in (self.checkpoint, self.table, self.curves, *self.folder.glob("epoch-*.png")):
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
                    f"can't resume: the run in {self.folder} has {name} {settings.get(name)}, not {value}; pass the "
                    f"same, or another --output"
                )
        mindspore.load_param_into_net(cell, parameters, strict_load=True)
        try:
            return epoch, read_csv(self.table, epoch * steps_per_epoch)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"can't resume: {self.table} does not go with the checkpoint: {error}") from None

    def save(self, cell, epoch, steps, images):
        # The checkpoint last: without its steps it could not be resumed, while a table with too many can.
        save_grid(self.folder / f"epoch-{epoch:03}.png", images)
        write_csv(self.table, steps)
        with replacing(self.checkpoint) as part:
            mindspore.save_checkpoint(
                cell, str(part), append_dict={"epoch": epoch, "settings": json.dumps(self._settings)}
            )


class StepRecorder:
    """Appends every step, with the losses of its whole batch, to `steps` and shows it in the progress bar."""

    def __init__(self, steps, bar, ranks):
        self._steps, self._bar, self._ranks = steps, bar, ranks
        self._outputs = []

    def add(self, outputs):
        self._outputs.append(outputs)
        # Reading a value makes the host wait for the device, so not in each step.
        if len(self._outputs) == 16:
            self.flush()

    def flush(self):
        if not self._outputs:
            return
        means = self._ranks.mean([losses.asnumpy() for _, _, _, losses in self._outputs])
        for losses, (_, overflow, loss_scale, _) in zip(means.tolist(), self._outputs):
            # One value of both networks, or one for each.
            overflow, loss_scale = (np.broadcast_to(value.asnumpy(), 2).tolist() for value in (overflow, loss_scale))
            self._steps.append(Step(len(self._steps) + 1, *losses, *overflow, *loss_scale))
        recent = self._steps[-len(self._outputs) :]
        losses = [sum(values) / len(recent) for values in zip(*(step[1:3] for step in recent))]
        scales = sorted({f"{scale:g}" for scale in recent[-1][5:]})
        self._bar.set_postfix_str(
            f"D {losses[0]:.3f}, G {losses[1]:.3f}, scale {'/'.join(scales)}, skipped {skipped(self._steps)}",
            refresh=False,
        )
        self._bar.update(len(recent))
        self._outputs.clear()


def skipped(steps):
    """The number of steps in which an update was skipped."""
    return sum(step.discriminator_overflow or step.generator_overflow for step in steps)


def draw(generator, weights, noise):
    """
    Images from -1 to 1, drawn within the context that `weights` opens. BatchNorm uses its moving statistics: so a digit
    depends on its own noise only and not on what else is in the batch, and drawing leaves the statistics alone.
    """
    generator.set_train(False)
    with weights():
        images = [generator(Tensor(part)).asnumpy() for part in np.split(noise, len(noise) // 100)]
    generator.set_train(True)
    return np.concatenate(images).astype(np.float32)


def train_epoch(cell, digits, args, epoch, recorder, ranks):
    # From the epoch's number, so that a resumed run continues with the noise that it would have seen.
    rng = np.random.default_rng((args.seed, epoch, TRAINING_NOISE))
    dataset = train_dataset(digits, args.batch_size, args.seed, epoch, ranks.share)
    for images, _ in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        noise = rng.standard_normal((args.batch_size, args.latent), dtype=np.float32)
        recorder.add(cell(Tensor(2 * images - 1), Tensor(ranks.share(noise))))
    # The last window of the epoch may be a partial one.
    cell.flush()
    recorder.flush()


def print_score(generator, weights, run, digits, args, fingerprint):
    # Whatever --mode says: this is no part of the training, and compiled it takes seconds.
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(args.seed)
    network, accuracy = judge.load_or_train(run.judge, digits, fingerprint)
    rng = np.random.default_rng((args.seed, 0, JUDGED_NOISE))
    images = draw(generator, weights, rng.standard_normal((JUDGED_SAMPLES, args.latent), dtype=np.float32))
    probabilities = judge.class_probabilities(network, (images + 1) / 2)
    shares = np.bincount(probabilities.argmax(axis=1), minlength=10) / JUDGED_SAMPLES
    print(f"A LeNet with a test accuracy of {accuracy:.2%} judges {JUDGED_SAMPLES:,} drawn digits:")
    print(f"Mean top-class probability: {probabilities.max(axis=1).mean():.4f}")
    print("Share of each class: " + ", ".join(f"{digit}: {share:.1%}" for digit, share in enumerate(shares)))
    print(f"Classes with more than 2 %: {(shares > 0.02).sum()} of 10")


def train(args):
    digits = load_digits(args.data)
    steps_per_epoch = len(digits.train_images) // args.batch_size
    if steps_per_epoch == 0:
        raise InputError(f"--batch-size {args.batch_size} is more than the {len(digits.train_images)} training images")
    fingerprint = f"{len(digits.train_images)} images, CRC {zlib.crc32(digits.train_images):08x}"
    ranks = join_ranks(args)
    generator, cell = make_cell(args)
    run = Run(args, fingerprint)
    if args.resume:
        epoch, steps = run.resume(cell, steps_per_epoch)
        if ranks.is_first:
            print(f"Resuming after epoch {epoch} of {args.epochs}")
    else:
        epoch, steps = 0, []
        if ranks.is_first:
            run.begin()

    grid_noise = np.random.default_rng((args.seed, 0, GRID_NOISE)).standard_normal((GRID_SIDE**2, args.latent))
    grid_noise = grid_noise.astype(np.float32)
    weights = cell.ema_weights if args.ema else contextlib.nullcontext
    total = max(args.epochs, epoch) * steps_per_epoch
    try:
        with tqdm(
            total=total,
            initial=len(steps),
            unit="step",
            desc="DCGAN",
            dynamic_ncols=True,
            disable=not ranks.is_first,
        ) as bar:
            recorder = StepRecorder(steps, bar, ranks)
            while epoch < args.epochs:
                train_epoch(cell, digits, args, epoch + 1, recorder, ranks)
                epoch += 1
                if ranks.is_first:
                    run.save(cell, epoch, steps, draw(generator, weights, grid_noise))
        finish_ranks()
        if not ranks.is_first:
            return 0
        title = (
            f"DCGAN, {len(digits.train_images):,} images: {args.update}, {args.amp_level}, loss scale {args.loss_scale}"
        )
        plot(run.curves, steps, title, steps_per_epoch, separate=args.update == "alternating")
        print(f"Trained {epoch} epochs of {steps_per_epoch} steps; skipped {skipped(steps)} steps that overflowed")
        print(f"Wrote {run.checkpoint}, {run.table.name}, {run.curves.name} and epoch-*.png")
        print_score(generator, weights, run, digits, args, fingerprint)
    except KeyboardInterrupt:
        if ranks.is_first:
            cure = f"--resume continues after epoch {epoch}" if epoch else "no epoch was finished, so begin again"
            print(f"Interrupted: {cure}", file=sys.stderr)
        return 130
    return 0


def main():
    parser = make_parser()
    args = parse_arguments(parser)
    try:
        return train(args)
    except (DataError, InputError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n" if is_first_process() else None)


if __name__ == "__main__":
    sys.exit(main())
