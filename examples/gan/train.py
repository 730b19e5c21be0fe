"""
Trains a DCGAN to draw handwritten digits in mixed precision, with a training cell of ms_lossscale for two networks.

    python examples/gan/train.py
    python examples/gan/train.py --loss wgan-gp
    msrun --worker_num=2 --local_worker_num=2 --join=True examples/gan/train.py

Writes a checkpoint, a CSV file of every step, a PNG of the curves and one of drawn digits for each epoch to the output
folder, see --output. At the end, a LeNet that was trained on real digits judges the drawn ones. Several ranks share
each batch, and the first one writes, draws and judges.
"""

import contextlib
import os
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# To import the modules that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import judge
import mindspore
import network
import numpy as np
import wgan_gp
from common.data import load_digits, steps_per_epoch, train_dataset
from common.input_error import InputError
from common.options import find_first_scale, make_loss_scale, step_keywords
from common.output import written_scale
from common.ranks import finish_ranks, is_first_process, start_ranks
from common.retries import Retries, print_steps, skipped_so_far
from mindspore import Tensor, amp, nn
from options import make_parser, parse_arguments
from record import Step, plot
from run_folder import GanRunFolder
from tqdm import tqdm

from ms_lossscale import AlternatingTrainOneStepCell, SimultaneousTrainOneStepCell

# Adam's, for each loss. Those of wgan-gp are its paper's, except that nn.Adam refuses 0.
BETAS = {"non-saturating": (0.5, 0.999), "wgan-gp": (1e-8, 0.9)}

LOSS_UNITS = {"non-saturating": "cross-entropy (nats)", "wgan-gp": "mean scores and penalty"}

# Each purpose has its own stream of random numbers.
TRAINING_NOISE, GRID_NOISE, JUDGED_NOISE = 1, 2, 3

GRID_SIDE = 10
JUDGED_SAMPLES = 1000


def make_loss_scales(args):
    """Returns a list with a loss scale for each network, or one for both."""
    if args.update == "alternating" or args.separate_scales:
        return [make_loss_scale(args), make_loss_scale(args)]
    return make_loss_scale(args)


def make_losses(args, generator, discriminator, loss_scale):
    """Returns a cell with the discriminator's loss and the generator's, or, to alternate, a list of two cells."""
    networks = generator, discriminator
    simultaneous = args.update == "simultaneous"
    if args.loss == "wgan-gp":
        its_scale = loss_scale[0] if isinstance(loss_scale, list) else loss_scale
        penalty = wgan_gp.GradientPenalty(discriminator, its_scale)
        if simultaneous:
            return wgan_gp.BothLosses(*networks, penalty)
        return [wgan_gp.CriticLoss(*networks, penalty), wgan_gp.GeneratorLoss(*networks)]
    if simultaneous:
        return network.BothLosses(*networks)
    return [network.DiscriminatorLoss(*networks), network.GeneratorLoss(*networks)]


def make_cell(args):
    """Returns the generator, and the cell that trains both networks on the inputs of `training_inputs`."""
    generator = network.Generator(args.latent, args.filters)
    discriminator = (wgan_gp.Critic if args.loss == "wgan-gp" else network.Discriminator)(args.filters)
    # They have layers of the same name, so a checkpoint can hold both only with a prefix.
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    generator = amp.auto_mixed_precision(generator, args.amp_level)
    discriminator = amp.auto_mixed_precision(discriminator, args.amp_level)
    beta1, beta2 = BETAS[args.loss]
    optimizers = [
        nn.Adam(weights, args.learning_rate, beta1=beta1, beta2=beta2)
        for weights in (discriminator.trainable_params(), generator.trainable_params())
    ]
    loss_scale = make_loss_scales(args)
    losses = make_losses(args, generator, discriminator, loss_scale)
    keywords = step_keywords(args)
    # Digits are drawn with the average of the generator's weights. The discriminator needs none.
    keywords["ema_decay"] = [None, keywords["ema_decay"]]
    if args.update == "simultaneous":
        cell = SimultaneousTrainOneStepCell(losses, optimizers, loss_scale, **keywords)
    else:
        cell = AlternatingTrainOneStepCell(
            losses,
            optimizers,
            loss_scale,
            every=(1, args.n_critic),
            network_inputs=[(0, 1, 2) if args.loss == "wgan-gp" else (0, 1), (1,)],
            **keywords,
        )
    return generator, cell.set_train()


class StepRecorder:
    """Appends every step, with the losses of its whole batch, to `steps`, and shows it in the progress bar."""

    def __init__(self, steps, bar, ranks, cell, args):
        self._steps, self._bar, self._ranks, self._retries = steps, bar, ranks, Retries(cell)
        self._cell, self._args = cell, args
        self._outputs = []

    def add(self, outputs):
        self._outputs.append((*outputs, self._retries.snapshot()))
        # Reading a value makes the host wait for the device, so it is not done in each step.
        if len(self._outputs) == 16:
            self.flush()

    def flush(self):
        if not self._outputs:
            return
        means = self._ranks.mean([losses.asnumpy() for _, _, _, losses, _ in self._outputs])
        for losses, (_, overflow, loss_scale, _, retries) in zip(means.tolist(), self._outputs):
            values = overflow.asnumpy(), loss_scale.asnumpy(), self._retries.since_the_last(retries)
            # One value for both networks, or one for each.
            overflow, loss_scale, retries = (np.broadcast_to(value, 2).tolist() for value in values)
            self._steps.append(Step(len(self._steps) + 1, *losses, *overflow, *loss_scale, *retries))
        recent = self._steps[-len(self._outputs) :]
        losses = [sum(values) / len(recent) for values in zip(*(step[1:3] for step in recent))]
        scales = map(written_scale, sorted(set(recent[-1][5:7])))
        texts = [f"D {losses[0]:.3f}", f"G {losses[1]:.3f}", f"scale {'/'.join(scales)}"]
        texts.append(skipped_so_far(self._cell, self._args))
        self._bar.set_postfix_str(", ".join(filter(None, texts)), refresh=False)
        self._bar.update(len(recent))
        self._outputs.clear()


def draw(generator, weights, noise):
    """
    Returns images from -1 to 1, drawn within the context that `weights` opens. BatchNorm uses its moving statistics, so
    a digit depends only on its own noise and not on the rest of the batch, and drawing does not change the statistics.
    """
    generator.set_train(False)
    with weights():
        images = [generator(Tensor(part)).asnumpy() for part in np.split(noise, len(noise) // 100)]
    generator.set_train(True)
    return np.concatenate(images).astype(np.float32)


def training_inputs(digits, args, epoch, ranks):
    """Yields the inputs of the training cell for each step of an epoch."""
    # Seeded by the epoch, so that a resumed run continues with the noise that it would have seen.
    rng = np.random.default_rng((args.seed, epoch, TRAINING_NOISE))
    dataset = train_dataset(digits, args.batch_size, args.seed, epoch, ranks.share)
    for images, _ in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        noise = rng.standard_normal((args.batch_size, args.latent), dtype=np.float32)
        inputs = [Tensor(2 * images - 1), Tensor(ranks.share(noise))]
        if args.loss == "wgan-gp":
            inputs.append(Tensor(ranks.share(rng.random((args.batch_size, 1, 1, 1), dtype=np.float32))))
        yield inputs


def train_epoch(cell, digits, args, epoch, recorder, ranks):
    for inputs in training_inputs(digits, args, epoch, ranks):
        recorder.add(cell(*inputs))
    # The last accumulation cycle of the epoch may be incomplete.
    cell.flush()
    recorder.flush()


def print_score(generator, weights, run, digits, args):
    # Whatever --mode says, since this is not part of the training, and in graph mode it takes only seconds.
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(args.seed)
    lenet, accuracy = judge.load_or_train(run.judge, digits)
    rng = np.random.default_rng((args.seed, 0, JUDGED_NOISE))
    images = draw(generator, weights, rng.standard_normal((JUDGED_SAMPLES, args.latent), dtype=np.float32))
    probabilities = judge.class_probabilities(lenet, (images + 1) / 2)
    shares = np.bincount(probabilities.argmax(axis=1), minlength=10) / JUDGED_SAMPLES
    print(f"A LeNet with a test accuracy of {accuracy:.2%} judges {JUDGED_SAMPLES:,} drawn digits:")
    print(f"Mean top-class probability: {probabilities.max(axis=1).mean():.4f}")
    print("Share of each class: " + ", ".join(f"{digit}: {share:.1%}" for digit, share in enumerate(shares)))
    print(f"Classes with more than 2 %: {(shares > 0.02).sum()} of 10")


def train(args):
    digits = load_digits(args.data)
    epoch_steps = steps_per_epoch(digits, args.batch_size)
    ranks = start_ranks(args)
    generator, cell = make_cell(args)
    run = GanRunFolder(args, digits.fingerprint)
    epoch, steps = run.start(cell, epoch_steps, ranks)

    grid_noise = np.random.default_rng((args.seed, 0, GRID_NOISE)).standard_normal((GRID_SIDE**2, args.latent))
    grid_noise = grid_noise.astype(np.float32)
    weights = cell.ema_weights if args.ema else contextlib.nullcontext
    total = args.epochs * epoch_steps
    try:
        if epoch == 0:
            find_first_scale(cell, args, next(training_inputs(digits, args, 1, ranks)), ranks)
        with tqdm(
            total=total,
            initial=len(steps),
            unit="step" if args.accumulate == 1 else "batch",
            desc="DCGAN",
            dynamic_ncols=True,
            disable=not ranks.is_first,
        ) as bar:
            recorder = StepRecorder(steps, bar, ranks, cell, args)
            while epoch < args.epochs:
                train_epoch(cell, digits, args, epoch + 1, recorder, ranks)
                epoch += 1
                if ranks.is_first:
                    run.save(cell, epoch, steps, draw(generator, weights, grid_noise))
        finish_ranks()
        if not ranks.is_first:
            return 0
        title = (
            f"DCGAN, {len(digits.train_images):,} images: {args.loss}, {args.update}, {args.amp_level}, "
            f"loss scale {args.loss_scale}"
        )
        plot(
            run.curves,
            steps,
            title,
            LOSS_UNITS[args.loss],
            epoch_steps,
            separate_scales=args.update == "alternating" or args.separate_scales,
            separate_steps=args.update == "alternating",
        )
        print_steps(cell, args, epoch, epoch_steps)
        print(f"Wrote {run.checkpoint}, {run.table.name}, {run.curves.name} and epoch-*.png")
        print_score(generator, weights, run, digits, args)
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
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n" if is_first_process() else None)


if __name__ == "__main__":
    sys.exit(main())
