"""
Trains LeNet-5 on handwritten digits in mixed precision, with a loss scale of ms_lossscale.

    python examples/lenet/train.py
    msrun --worker_num=2 --local_worker_num=2 --join=True examples/lenet/train.py

Writes a checkpoint, a CSV file of every step and a PNG of the curves to the output folder, see --output. Several ranks
share each batch, and the first one writes. With --shard-optimizer they also share the optimizer's state. The checkpoint
is the same, and any number of ranks can resume from it, with or without this option.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# To import the modules that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from common.data import load_digits, steps_per_epoch, test_dataset, train_dataset
from common.input_error import InputError
from common.lenet5 import LeNet5, accuracy
from common.options import (
    add_execution_arguments,
    add_loss_scale_arguments,
    add_run_arguments,
    add_step_arguments,
    complete_loss_scale,
    find_first_scale,
    make_loss_scale,
    positive_float,
    step_keywords,
)
from common.output import written_scale
from common.ranks import finish_ranks, is_first_process, start_ranks
from common.retries import Retries, print_steps, skipped_so_far
from common.run_folder import RunFolder
from history import Step, plot
from mindspore import Callback, Model, nn
from tqdm import tqdm

from ms_lossscale import FlushAccumulation, ShardedOptimizer, build_train_network

# Each optimizer with its default initial learning rate.
OPTIMIZERS = {
    "adamweightdecay": (nn.AdamWeightDecay, 2e-3),
    "adam": (nn.Adam, 2e-3),
    "momentum": (lambda params, learning_rate: nn.Momentum(params, learning_rate, momentum=0.9), 4e-2),
    "rmsprop": (nn.RMSProp, 2e-3),
    "sgd": (nn.SGD, 2e-1),
}

LEARNING_RATE_DECAY = 0.7  # the factor after each epoch

# Each loss scale with its options and their defaults.
LOSS_SCALES = {
    "none": {},
    "fixed": {"scale": 1024.0},
    "fixed-no-drop": {"scale": 1024.0},
    "dynamic": {"scale": None, "scale_window": 100, "max_retries": 0},
    "scheduled": {"milestone": [250, 500, 1000], "scales": [256.0, 4096.0, 65536.0]},
}


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train LeNet-5 on handwritten digits in mixed precision, with a loss scale of ms_lossscale."
    )
    add_run_arguments(parser, "output/lenet", 6, "the weights and the order of the digits")
    add = parser.add_argument
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
        help=f"initial learning rate; it is multiplied by {LEARNING_RATE_DECAY} after each epoch (default: {rates})",
    )
    add(
        "--shard-optimizer",
        action="store_true",
        help="share the optimizer's state between the ranks of msrun; with one rank, this changes nothing",
    )
    add_execution_arguments(parser, "O2")

    group = parser.add_argument_group("step")
    add_step_arguments(group, ema=0.0)

    add_loss_scale_arguments(parser.add_argument_group("loss scale"), LOSS_SCALES)
    return parser


def parse_arguments(parser):
    """Returns the arguments, with defaults that depend on other arguments filled in."""
    args = parser.parse_args()
    complete_loss_scale(parser, args, LOSS_SCALES)
    if args.learning_rate is None:
        args.learning_rate = OPTIMIZERS[args.optimizer][1]
    return args


def make_cell(args, steps_per_epoch):
    """Returns the network and its training cell."""
    network = LeNet5()
    make_optimizer, _ = OPTIMIZERS[args.optimizer]
    # Skipped steps don't count: the schedule follows the optimizer's own counter, which they do not change.
    updates_per_epoch = -(-steps_per_epoch // args.accumulate)
    schedule = nn.ExponentialDecayLR(args.learning_rate, LEARNING_RATE_DECAY, updates_per_epoch)
    shard = ShardedOptimizer if args.shard_optimizer else lambda weights, make: make(weights)
    cell = build_train_network(
        network,
        shard(network.trainable_params(), lambda weights: make_optimizer(weights, schedule)),
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        level=args.amp_level,
        loss_scale_manager=make_loss_scale(args),
        **step_keywords(args),
    )
    return network, cell


class StepRecorder(Callback):
    """Appends every step, with the loss of its whole batch, to `steps`, and shows it in the progress bar."""

    def __init__(self, steps, bar, ranks, cell, args):
        super().__init__()
        self._steps, self._bar, self._ranks, self._retries = steps, bar, ranks, Retries(cell)
        self._cell, self._args = cell, args
        self._outputs = []

    def on_train_step_end(self, run_context):
        self._outputs.append((*run_context.original_args().net_outputs, self._retries.snapshot()))
        # Reading a value makes the host wait for the device, so it is not done in each step.
        if len(self._outputs) == 16:
            self._read()

    def on_train_epoch_end(self, run_context):
        self._read()

    def _read(self):
        losses = self._ranks.mean([float(loss.asnumpy()) for loss, _, _, _ in self._outputs])
        for loss, (_, overflow, loss_scale, retries) in zip(losses.tolist(), self._outputs):
            retries = int(self._retries.since_the_last(retries)[0])
            overflow, loss_scale = bool(overflow.asnumpy()), float(loss_scale.asnumpy())
            self._steps.append(Step(len(self._steps) + 1, loss, overflow, loss_scale, retries))
        recent = [step.loss for step in self._steps[-len(self._outputs) :]]
        texts = [f"loss {sum(recent) / len(recent):.3f}", f"scale {written_scale(self._steps[-1].loss_scale)}"]
        texts.append(skipped_so_far(self._cell, self._args))
        self._bar.set_postfix_str(", ".join(filter(None, texts)), refresh=False)
        self._bar.update(len(self._outputs))
        self._outputs.clear()


def interrupt(signum, frame):
    raise KeyboardInterrupt


def train(args):
    digits = load_digits(args.data)
    epoch_steps = steps_per_epoch(digits, args.batch_size)
    ranks = start_ranks(args)
    network, cell = make_cell(args, epoch_steps)
    run = RunFolder(args, "lenet.ckpt", Step, ("optimizer",), digits.fingerprint)
    epoch, steps = run.start(cell, epoch_steps, ranks)

    # While a graph runs, MindSpore passes a Ctrl-C on to Python as SIGTERM.
    signal.signal(signal.SIGTERM, interrupt)
    model = Model(cell)
    total = args.epochs * epoch_steps
    try:
        if epoch == 0:
            dataset = train_dataset(digits, args.batch_size, args.seed, 1, ranks.share)
            find_first_scale(cell, args, next(dataset.create_tuple_iterator(num_epochs=1)), ranks)
        with tqdm(
            total=total,
            initial=len(steps),
            unit="step" if args.accumulate == 1 else "batch",
            desc="LeNet-5",
            dynamic_ncols=True,
            disable=not ranks.is_first,
        ) as bar:
            recorder = StepRecorder(steps, bar, ranks, cell, args)
            while epoch < args.epochs:
                dataset = train_dataset(digits, args.batch_size, args.seed, epoch + 1, ranks.share)
                callbacks = [recorder, FlushAccumulation()]
                model.train(epoch + 1, dataset, callbacks, dataset_sink_mode=False, initial_epoch=epoch)
                epoch += 1
                state = run.whole_state(cell, ranks) if args.shard_optimizer else cell
                if ranks.is_first:
                    run.save(state, epoch, steps)
    except KeyboardInterrupt:
        if ranks.is_first:
            cure = f"--resume continues after epoch {epoch}" if epoch else "no epoch was finished, so begin again"
            print(f"Interrupted: {cure}", file=sys.stderr)
        return 130

    finish_ranks()
    if ranks.is_first:
        report(args, digits, network, cell, run, epoch, steps, epoch_steps)
    return 0


def report(args, digits, network, cell, run, epoch, steps, steps_per_epoch):
    settings = f"{args.optimizer}, {args.amp_level}, loss scale {args.loss_scale}"
    title = f"LeNet-5, {len(digits.train_images):,} images: {settings}"
    plot(run.curves, steps, title, "step" if args.accumulate == 1 else "batch", steps_per_epoch)
    print_steps(cell, args, epoch, steps_per_epoch)
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
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n" if is_first_process() else None)


if __name__ == "__main__":
    sys.exit(main())
