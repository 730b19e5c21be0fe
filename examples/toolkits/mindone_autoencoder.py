"""
Trains a small variational autoencoder of mindone on handwritten digits, alone and against a discriminator, with
mindone's optimizers, schedules, EMA and callbacks.

    python examples/toolkits/mindone_autoencoder.py

It first compares a few of mindone's own steps with those of ms_lossscale. Then it trains both networks with one
overflow check and one update.
"""

import logging
import os
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from common.data import load_digits
from common.output import written_scale
from comparison import Losses, compare_first_steps, print_changes
from mindone.diffusers import AutoencoderKL
from mindone.trainers.callback import EvalSaveCallback, OverflowMonitor
from mindone.trainers.ema import EMA
from mindone.trainers.lr_schedule import create_scheduler
from mindone.trainers.optim import create_optimizer
from mindone.trainers.train_step import TrainOneStepWrapper
from mindone.utils.amp import auto_mixed_precision
from mindspore import Model, Tensor, load_checkpoint, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.dataset import NumpySlicesDataset

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    LossScaleMonitor,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)

# MindSpore 2.10 on CPU, even with its own cells, hangs in the 30th step of a graph with this autoencoder's backward.
BATCH_SIZE, DIGITS, TEST_DIGITS, EPOCHS, FIRST_STEPS = 16, 128, 64, 3, 5
SIZE = 28


def before(loss, optimizer, ema):
    return TrainOneStepWrapper(loss, optimizer, scale_sense=Tensor(1024.0), ema=ema, clip_grad=True, clip_norm=1.0)


def after(loss, optimizer, ema):
    return ScaledTrainOneStepCell(loss, optimizer, DynamicLossScale(1024.0), after_update=ema.ema_update, clip_norm=1.0)


def both_before(losses, optimizers):
    train_generator = TrainOneStepWrapper(losses[0], optimizers[0], Tensor(1024.0))
    train_discriminator = TrainOneStepWrapper(losses[1], optimizers[1], Tensor(1024.0))

    def step(images):
        generator_loss, _, _ = train_generator(images)
        discriminator_loss, _, _ = train_discriminator(images)
        return generator_loss, discriminator_loss

    return step


def both_after(losses, optimizers):
    cell = AlternatingTrainOneStepCell(losses, optimizers, DynamicLossScale(1024.0))

    def step(images):
        _, _, _, (generator_loss, discriminator_loss) = cell(images)
        return generator_loss, discriminator_loss

    return step


def both_at_once(losses, optimizers):
    return SimultaneousTrainOneStepCell(losses, optimizers, DynamicLossScale(2.0**24), max_retries=4)


class Autoencoder(nn.Cell):
    """Reconstructs images through the mean of their latent distribution."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.vae = AutoencoderKL(
            in_channels=1,
            out_channels=1,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            block_out_channels=(8, 16),
            latent_channels=4,
            norm_num_groups=4,
            sample_size=SIZE,
        )
        replace_convolutions(self.vae)
        auto_mixed_precision(self.vae, "O2")

    def construct(self, images):
        moments = self.vae.encode(images, return_dict=False)[0].astype(mstype.float32)
        mean, log_variance = moments.chunk(2, 1)
        images = self.vae.decode(mean, return_dict=False)[0].astype(mstype.float32)
        return images, mean, log_variance


def reconstruction_loss(images, reconstructed, mean, log_variance):
    """Returns the squared error, plus a little of the latent distribution's divergence from the normal one."""
    divergence = 0.5 * (mean**2 + ops.exp(log_variance) - 1 - log_variance).mean()
    return ((reconstructed - images) ** 2).mean() + 1e-4 * divergence


class ReconstructionLoss(nn.Cell):
    """The loss of an autoencoder that is trained alone."""

    def __init__(self, autoencoder):
        super().__init__(auto_prefix=False)
        self.autoencoder = autoencoder

    def construct(self, images):
        return reconstruction_loss(images, *self.autoencoder(images))


class GeneratorLoss(nn.Cell):
    """The loss of an autoencoder that is trained against a discriminator."""

    def __init__(self, autoencoder, discriminator):
        super().__init__(auto_prefix=False)
        self.autoencoder, self.discriminator = autoencoder, discriminator

    def construct(self, images):
        outputs = self.autoencoder(images)
        return reconstruction_loss(images, *outputs) - 0.05 * self.discriminator(outputs[0]).mean()


class DiscriminatorLoss(nn.Cell):
    """The discriminator's hinge loss."""

    def __init__(self, autoencoder, discriminator):
        super().__init__(auto_prefix=False)
        self.autoencoder, self.discriminator = autoencoder, discriminator

    def construct(self, images):
        reconstructed = ops.stop_gradient(self.autoencoder(images)[0])
        real, fake = self.discriminator(images), self.discriminator(reconstructed)
        return 0.5 * (ops.relu(1 - real).mean() + ops.relu(1 + fake).mean())


class Discriminator(nn.Cell):
    """Judges patches of images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(
            nn.Conv2d(1, 16, 4, 2, pad_mode="same", has_bias=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, pad_mode="same", has_bias=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 4, 1, pad_mode="same", has_bias=True),
        ).to_float(mstype.float16)

    def construct(self, images):
        return self.layers(images).astype(mstype.float32)


def replace_convolutions(cell):
    """Replaces mint.nn.Conv2d, which has no kernel on CPU, by nn.Conv2d."""
    for name, part in cell.name_cells().items():
        if type(part) is not mint.nn.Conv2d:
            replace_convolutions(part)
            continue
        convolution = nn.Conv2d(
            part.in_channels,
            part.out_channels,
            part.kernel_size,
            part.stride,
            pad_mode="pad",
            padding=part.padding[0] if isinstance(part.padding, tuple) else part.padding,
            has_bias=part.bias is not None,
        )
        convolution.weight, convolution.bias = part.weight, part.bias
        weight_names = {weight: weight.name for weight in convolution.trainable_params()}
        if isinstance(cell, (nn.CellList, nn.SequentialCell)):
            cell[int(name)] = convolution
        else:
            setattr(cell, name, convolution)
        # Inserting it has renamed them.
        for weight, weight_name in weight_names.items():
            weight.name = weight_name


def optimizer_of(network):
    schedule = create_scheduler(
        DIGITS // BATCH_SIZE,
        "cosine_decay",
        lr=2e-3,
        end_lr=1e-5,
        warmup_steps=2,
        decay_steps=EPOCHS * DIGITS // BATCH_SIZE,
        # One epoch more for the first steps.
        num_epochs=EPOCHS + 1,
    )
    return create_optimizer(network.trainable_params(), name="adamw", lr=schedule)


class Alone:
    """An autoencoder, always the same, with its training step."""

    def __init__(self, make_step):
        mindspore.set_seed(0)
        autoencoder = Autoencoder()
        self.ema = EMA(autoencoder, ema_decay=0.9, offloading=False)
        self.cell = make_step(ReconstructionLoss(autoencoder), optimizer_of(autoencoder), self.ema)
        self.cell.network.set_train()

    def first_steps(self, dataset):
        losses = Losses()
        Model(self.cell).train(1, dataset, callbacks=[losses], dataset_sink_mode=False)
        return losses.losses


class Both:
    """An autoencoder and a discriminator, always the same, with their training step."""

    def __init__(self, make_step):
        mindspore.set_seed(0)
        self.autoencoder, discriminator = Autoencoder(), Discriminator()
        networks = self.autoencoder, discriminator
        losses = [GeneratorLoss(*networks).set_train(), DiscriminatorLoss(*networks).set_train()]
        self.step = make_step(losses, [optimizer_of(network) for network in networks])

    def first_steps(self, dataset):
        losses = [self.step(images) for (images,) in dataset.create_tuple_iterator(num_epochs=1)]
        return [[float(loss.asnumpy()) for loss in of_network] for of_network in zip(*losses)]


def some(images, number):
    chosen = np.random.default_rng(0).permutation(len(images))[:number]
    return images[chosen].astype(np.float32) / 255


def digits(number):
    return NumpySlicesDataset((some(load_digits().train_images, number),), shuffle=False).batch(BATCH_SIZE)


def test_error(autoencoder):
    """Returns the mean squared error of reconstructed test digits."""
    images = some(load_digits().test_images, TEST_DIGITS)
    reconstructed, *_ = autoencoder(Tensor(images))
    return float(((reconstructed.asnumpy() - images) ** 2).mean())


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    output = Path("output/toolkits/mindone")
    output.mkdir(parents=True, exist_ok=True)
    few = FIRST_STEPS * BATCH_SIZE

    columns = {"mindone": Alone(before).first_steps(digits(few)), "ms_lossscale": Alone(after).first_steps(digits(few))}
    compare_first_steps(columns, tolerance=1e-3)
    stock, ours = Both(both_before).first_steps(digits(few)), Both(both_after).first_steps(digits(few))
    for name, of_stock, of_ours in zip(("autoencoder", "discriminator"), stock, ours):
        compare_first_steps({f"mindone's {name}": of_stock, f"ms_lossscale's {name}": of_ours}, tolerance=1e-3)

    both = Both(both_at_once)
    cell, untrained = both.step, test_error(both.autoencoder)
    saving = EvalSaveCallback(cell.network, ckpt_save_dir=str(output), log_interval=4, record_lr=True)
    model = Model(cell)
    callbacks = [OverflowMonitor(), saving, LossScaleMonitor(every_n_steps=8)]
    model.train(EPOCHS, digits(DIGITS), callbacks=callbacks, dataset_sink_mode=False)
    trained = test_error(both.autoencoder)
    print(f"mean squared error of {TEST_DIGITS} test digits: {untrained:.3f} before training, {trained:.3f} after it")
    print(f"{cell.counters()}, loss scale {written_scale(cell.get_loss_scale())}")
    resumed = Both(both_at_once).step
    parameters = load_checkpoint(str(output / "train_resume.ckpt"))
    # Saved by mindone's callback in addition to the cell.
    epoch, loss_scale = (parameters.pop(name) for name in ("epoch_num", "loss_scale"))
    resumed.load_state_dict(parameters)
    scale = written_scale(loss_scale.asnumpy())
    print(f"resumed after epoch {epoch.asnumpy()}, at loss scale {scale}: {resumed.counters()}")
    print_changes(before, after)
    print_changes(both_before, both_after)


if __name__ == "__main__":
    main()
