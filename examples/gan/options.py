"""The command line of the GAN example."""

import argparse
import functools

from common.options import (
    add_execution_arguments,
    add_loss_scale_arguments,
    add_run_arguments,
    add_step_arguments,
    complete_loss_scale,
    positive_float,
    positive_int,
    refuse_unused,
)

# Each loss scale with its options and their defaults.
LOSS_SCALES = {
    "none": {},
    "fixed": {"scale": 1024.0},
    "fixed-no-drop": {"scale": 1024.0},
    "dynamic": {"scale": None, "scale_window": 200, "max_retries": 3},
    "scheduled": {"milestone": [250, 500, 1000], "scales": [256.0, 1024.0, 4096.0]},
}

# Each loss with the defaults that depend on it.
LOSSES = {
    "non-saturating": {"update": "simultaneous", "n_critic": 1},
    "wgan-gp": {"update": "alternating", "n_critic": 5},
}


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train a DCGAN to draw handwritten digits in mixed precision, with a training cell of ms_lossscale "
        "for two networks."
    )
    add_run_arguments(parser, "output/gan", 48, "the weights, the order of the digits and the noise")
    add = parser.add_argument
    add(
        "--loss",
        choices=LOSSES,
        default="non-saturating",
        help="non-saturating: cross-entropy, and the generator learns to make the discriminator take its digits for "
        "real; wgan-gp: Wasserstein loss with gradient penalty. Its discriminator is a critic without BatchNorm, and "
        "the gradient in the critic's loss is computed under the critic's loss scale. In float16 that always overflows "
        "at 65536, so a fixed scale must be lower (default: %(default)s)",
    )
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
        help="random numbers from which a digit is drawn (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=positive_float,
        default=5e-4,
        metavar="RATE",
        help="learning rate of both Adam optimizers; the 1e-4 of wgan-gp's paper needs several times as many epochs "
        "(default: %(default)s)",
    )
    add_execution_arguments(parser, "O3")

    group = parser.add_argument_group("updates")
    add_step_arguments(group, ema=0.99)
    add = group.add_argument
    add(
        "--update",
        choices=("simultaneous", "alternating"),
        help="simultaneous: one forward and one loss scale for both networks, and both are updated or neither; "
        "alternating: first the discriminator, then the generator with the updated one, each with its own loss scale "
        f"(default: {_defaults('update')})",
    )
    add(
        "--n-critic",
        type=positive_int,
        metavar="N",
        help=f"alternating: train the generator only in every Nth step (default: {_defaults('n_critic')})",
    )

    group = parser.add_argument_group("loss scale")
    add_loss_scale_arguments(group, LOSS_SCALES)
    group.add_argument(
        "--separate-scales",
        action="store_true",
        help="simultaneous: use a loss scale for each network; an overflow of either skips the step of both, but "
        "lowers only its own scale",
    )
    return parser


def _defaults(name):
    return ", ".join(f"{defaults[name]} with {loss}" for loss, defaults in LOSSES.items())


def parse_arguments(parser, argv=None):
    """Returns the arguments, with defaults that depend on other arguments filled in."""
    args = parser.parse_args(argv)
    complete_loss_scale(parser, args, LOSS_SCALES)
    n_critic = args.n_critic
    for name, default in LOSSES[args.loss].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.update == "simultaneous":
        if n_critic is not None:
            by = "--update simultaneous, which updates both networks or none"
            refuse_unused(parser, "--n-critic", by, "--update alternating", n_critic)
        args.n_critic = 1
    if args.separate_scales:
        refuse_separate_scales(parser, args)
    return args


def refuse_separate_scales(parser, args):
    """Refuses `--separate-scales` where it makes no difference."""
    refused = functools.partial(refuse_unused, parser, "--separate-scales")
    if args.update == "alternating":
        refused("--update alternating, where each network has a loss scale of its own anyway", "--update simultaneous")
    if args.loss_scale not in ("dynamic", "scheduled"):
        refused(f"--loss-scale {args.loss_scale}, which is the same for both networks anyway", "--loss-scale dynamic")
