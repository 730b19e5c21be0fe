"""Trains LeNet-5 with a loss of small weight, like a term of a larger loss, so that float16 gradients underflow."""

from pathlib import Path

import mindspore
from common.data import load_digits, steps_per_epoch, train_dataset
from common.input_error import InputError
from common.lenet5 import LeNet5
from common.options import positive_float, positive_int
from mindspore import Callback, Model, nn


class WeightedLoss(nn.Cell):
    """Cross-entropy times a weight."""

    def __init__(self, weight):
        super().__init__()
        self._cross_entropy = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        self._weight = weight

    def construct(self, logits, labels):
        return self._cross_entropy(logits, labels) * self._weight


class Progress(Callback):
    """Moves the progress bar."""

    def __init__(self, bar):
        super().__init__()
        self._bar = bar

    def on_train_step_end(self, run_context):
        self._bar.update()


def add_weighted_arguments(parser):
    """Adds the options for the weight and the batches."""
    parser.add_argument(
        "--batch-size", type=positive_int, default=64, metavar="N", help="digits in a step (default: %(default)s)"
    )
    parser.add_argument(
        "--loss-weight",
        type=positive_float,
        default=1e-5,
        metavar="WEIGHT",
        help="factor of the loss (default: %(default)s)",
    )


def load_or_exit(parser, args):
    """Returns the digits and the number of batches in an epoch, or exits with an error message and status 2."""
    try:
        digits = load_digits(args.data)
        return digits, steps_per_epoch(digits, args.batch_size)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def make_folder_or_exit(parser, args):
    """Makes and returns the output folder, or exits with an error message and status 2."""
    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: can't write to the output folder: {error}\n")
    return folder


def train(make_cell, args, digits, seed, bar, before_epoch=None):
    """
    Trains a LeNet-5 for `args.epochs`, and returns it.

    `make_cell(network, optimizer, loss)` makes the training cell, and `before_epoch(cell)` is called before each epoch.
    """
    mindspore.set_seed(seed)
    network = LeNet5()
    schedule = nn.ExponentialDecayLR(1e-3, 0.8, steps_per_epoch(digits, args.batch_size))
    # The usual eps would dominate gradients as small as these.
    optimizer = nn.AdamWeightDecay(network.trainable_params(), schedule, eps=1e-16)
    cell = make_cell(network, optimizer, WeightedLoss(args.loss_weight))
    model = Model(cell)
    for epoch in range(1, args.epochs + 1):
        if before_epoch is not None:
            before_epoch(cell)
        dataset = train_dataset(digits, args.batch_size, seed, epoch)
        model.train(epoch, dataset, [Progress(bar)], dataset_sink_mode=False, initial_epoch=epoch - 1)
    return network
