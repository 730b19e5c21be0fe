"""Command-line options that the examples share, and their types."""

import argparse

import mindspore
import numpy as np

from common.data import add_data_argument
from common.input_error import InputError
from common.output import written_scale
from ms_lossscale import DynamicLossScale, FixedLossScale, ScheduledLossScale

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}


def positive_int(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {value}")
    return value


def not_negative_int(text):
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, but got {value}")
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


def add_run_arguments(parser, output, epochs, seed_of):
    """Adds the options for data, training and output; `output` and `epochs` are defaults."""
    add = parser.add_argument
    add_data_argument(parser)
    add("--output", metavar="DIR", default=output, help="folder for the results (default: %(default)s)")
    add("--resume", action="store_true", help="continue from the last whole epoch of the run in the output folder")
    add(
        "--epochs",
        type=positive_int,
        default=epochs,
        help="number of epochs, including those before a resume (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=positive_int,
        default=32,
        metavar="N",
        help="digits in a step, on all ranks together (default: %(default)s)",
    )
    add("--seed", type=seed_int, default=0, help=f"seed of {seed_of} (default: %(default)s)")


def add_execution_arguments(parser, amp_level):
    """Adds the options for how MindSpore computes; `amp_level` is a default."""
    add = parser.add_argument
    add(
        "--amp-level",
        choices=("O0", "O1", "O2", "O3", "auto"),
        default=amp_level,
        help="MindSpore's level of mixed precision: O0 uses float32, O1 and auto use float16 for some operators, O2 "
        "for all except BatchNorm, O3 for all (default: %(default)s)",
    )
    add("--mode", choices=MODES, default="graph", help="MindSpore's execution mode (default: %(default)s)")
    add("--device", choices=("CPU", "GPU", "Ascend"), default="CPU", help="where to train (default: %(default)s)")


def refuse_unused(parser, option, by, cure, value=None):
    """Ends the program because an option has no effect with another one, with a message that says what to do."""
    given = option if value is None else f"{option} {value}"
    parser.error(f"argument {option}: not used by {by}: leave out {given}, or pass {cure}")


def add_step_arguments(group, ema):
    """Adds the options for what a step does besides scaling the loss; `ema` is a default."""
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
        help="keep a moving average of the weights with this decay, and use it at the end; 0 for none "
        "(default: %(default)s)",
    )


def step_keywords(args):
    """Returns the keywords of a training cell for the options of `add_step_arguments`."""
    return {
        "gradient_accumulation_steps": args.accumulate,
        "clip_norm": args.clip_norm,
        "ema_decay": args.ema or None,
        "max_retries": args.max_retries,
    }


def add_loss_scale_arguments(group, loss_scales):
    """Adds the options of the loss scale. `loss_scales` has the options of each kind, with their defaults."""
    add = group.add_argument
    add(
        "--loss-scale",
        choices=loss_scales,
        default="dynamic",
        help="none and fixed-no-drop do not check for overflow, and apply every step; the others skip steps that "
        "overflowed (default: %(default)s)",
    )
    add(
        "--scale",
        type=positive_float,
        help=f"the scale of fixed and fixed-no-drop (default: {loss_scales['fixed']['scale']:g}), or the initial scale "
        "of dynamic (default: half of the largest power of two at which the first batch does not overflow, see "
        "find_loss_scale)",
    )
    add(
        "--scale-window",
        type=positive_int,
        metavar="N",
        help="dynamic: steps in a row without overflow after which the scale is doubled (default: "
        f"{loss_scales['dynamic']['scale_window']}, so that it grows even in a run as short as this; 2000 is usual)",
    )
    add(
        "--max-retries",
        type=not_negative_int,
        metavar="N",
        help="dynamic: how often a batch whose gradients overflowed is retried at lower scales before its step "
        f"is skipped (default: {loss_scales['dynamic']['max_retries']})",
    )
    add(
        "--milestone",
        type=positive_int,
        nargs="+",
        metavar="STEP",
        help="scheduled: the steps at which each of --scales ends; the last scale is kept (default: "
        f"{' '.join(map(str, loss_scales['scheduled']['milestone']))})",
    )
    add(
        "--scales",
        type=positive_float,
        nargs="+",
        metavar="SCALE",
        help="scheduled: the scales, one for each milestone (default: "
        f"{' '.join(f'{scale:g}' for scale in loss_scales['scheduled']['scales'])})",
    )


def complete_loss_scale(parser, args, loss_scales):
    """Fills in the defaults of the chosen loss scale, and refuses options that it does not take."""
    defaults = loss_scales[args.loss_scale]
    for name in ("scale", "scale_window", "max_retries", "milestone", "scales"):
        value = getattr(args, name)
        if value is None:
            setattr(args, name, defaults.get(name))
        # The others make no retries anyway.
        elif name not in defaults and value != 0:
            kinds = " or ".join(kind for kind, taken in loss_scales.items() if name in taken)
            given = " ".join(f"{each:.9g}" for each in np.atleast_1d(value))
            option = f"--{name.replace('_', '-')}"
            refuse_unused(parser, option, f"--loss-scale {args.loss_scale}", f"--loss-scale {kinds}", given)
    args.max_retries = args.max_retries or 0


def make_loss_scale(args):
    """Returns the loss scale that the options ask for. Raises an InputError if their values are wrong."""
    try:
        if args.loss_scale == "none":
            return None
        if args.loss_scale == "dynamic":
            its = {} if args.scale is None else {"init_loss_scale": args.scale}
            return DynamicLossScale(**its, scale_window=args.scale_window)
        if args.loss_scale == "scheduled":
            return ScheduledLossScale(args.milestone, args.scales)
        return FixedLossScale(args.scale, drop_overflow_update=args.loss_scale == "fixed")
    except ValueError as error:
        raise InputError(str(error)) from None


def find_first_scale(cell, args, batch, ranks):
    """Finds the initial scale unless one was given, so that the first step is not skipped."""
    if args.loss_scale == "dynamic" and args.scale is None:
        found = np.atleast_1d(cell.set_train().find_loss_scale(*batch))
        if ranks.is_first:
            scales = " and ".join(map(written_scale, found))
            print(f"Starting at loss scale {scales}, half of the largest at which the first batch does not overflow")
            if not args.max_retries:
                print(
                    "Gradients often grow in the first steps, so that some are skipped all the same; --max-retries 3 "
                    "would try their batches again"
                )


# The names that argparse uses if the text is not a number.
positive_int.__name__ = not_negative_int.__name__ = seed_int.__name__ = "integer"
positive_float.__name__ = decay.__name__ = "number"
