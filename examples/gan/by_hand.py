"""
Trains the DCGAN of train.py by hand, with MindSpore's functions alone, and counts the updates that overflows lose.

    python examples/gan/by_hand.py [OPTION OF train.py ...]

As with `train.py --update alternating`, the discriminator learns before the generator, and each has a loss scale of its
own: an `amp.DynamicLossScaler`, as in MindSpore's tutorial on mixed precision.
"""

import os
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import network
from common.data import load_digits
from common.ranks import start_ranks
from mindspore import amp, nn
from options import make_parser, parse_arguments
from train import BETAS, training_inputs


def make_step(args, loss_cell, weights):
    """Returns a function of a loss cell's inputs that makes a step, and returns whether it updated."""
    beta1, beta2 = BETAS[args.loss]
    optimizer = nn.Adam(weights, args.learning_rate, beta1=beta1, beta2=beta2)
    scaler = amp.DynamicLossScaler(args.scale, scale_factor=2, scale_window=args.scale_window)

    def forward(*inputs):
        loss = loss_cell(*inputs)
        return scaler.scale(loss), loss

    value_and_grad = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

    @mindspore.jit
    def step(*inputs):
        _, grads = value_and_grad(*inputs)
        finite = amp.all_finite(grads)
        if finite:
            optimizer(scaler.unscale(grads))
        scaler.adjust(finite)
        return finite

    return step


def main():
    parser = make_parser()
    parser.description = "Train the DCGAN of train.py without ms_lossscale, and count the updates that overflows lose."
    parser.set_defaults(update="alternating", scale=65536, epochs=12)
    args = parse_arguments(parser)
    digits = load_digits(args.data)
    ranks = start_ranks(args)
    generator = network.Generator(args.latent, args.filters)
    discriminator = network.Discriminator(args.filters)
    generator.update_parameters_name("generator.")
    discriminator.update_parameters_name("discriminator.")
    generator = amp.auto_mixed_precision(generator, args.amp_level)
    discriminator = amp.auto_mixed_precision(discriminator, args.amp_level)
    losses = network.DiscriminatorLoss(generator, discriminator), network.GeneratorLoss(generator, discriminator)
    for loss in losses:
        loss.set_train()
    d_step = make_step(args, losses[0], discriminator.trainable_params())
    g_step = make_step(args, losses[1], generator.trainable_params())
    steps = lost = 0
    for epoch in range(1, args.epochs + 1):
        for images, noise in training_inputs(digits, args, epoch, ranks):
            updated = [bool(d_step(images, noise)), bool(g_step(noise))]
            lost += updated.count(False)
            steps += 1
    print(f"seed {args.seed}: {lost} updates lost in {steps:,} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
