"""Types of command-line options: what argparse says when a number is out of range."""

import argparse


def positive_int(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {value}")
    return value


def seed_int(text):
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**31 - 1, but got {value}")
    return value


def positive_float(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number > 0, but got {text}")
    return value


def decay(text):
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, but got {text}")
    return value


def add_step_arguments(group, ema):
    """Adds the options for what a step does besides scaling the loss, with the default decay `ema`."""
    group.add_argument(
        "--accumulate",
        type=positive_int,
        default=1,
        metavar="N",
        help="batches whose gradients are averaged for one update (default: %(default)s)",
    )
    group.add_argument(
        "--clip-norm",
        type=positive_float,
        metavar="NORM",
        help="largest global norm of the gradients (default: no limit)",
    )
    group.add_argument(
        "--ema",
        type=decay,
        default=ema,
        metavar="DECAY",
        help="keep a moving average of the weights with this decay and use it in the end; 0 for none "
        "(default: %(default)s)",
    )


def step_keywords(args):
    """The keywords of a training cell that `add_step_arguments` stands for."""
    return {
        "gradient_accumulation_steps": args.accumulate,
        "clip_norm": args.clip_norm,
        "ema_decay": args.ema or None,
    }


# What argparse calls them when the text is no number at all.
positive_int.__name__ = seed_int.__name__ = "integer"
positive_float.__name__ = decay.__name__ = "number"
