"""
Trains a small transformer and a small ResNet that overflow in float16 (O3) at every loss scale, asks which of their
cells need float32, and trains them again with the lines that the advice prints.

    python examples/diagnosis/advise.py

With `--networks mindcv-resnet18`, it trains a ResNet-18 of mindcv, which must be installed.

Exits with status 1 if an advice does not hold, or if training with it still skips most steps.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
# To import the modules that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from common.data import add_data_argument, load_digits, steps_per_epoch, test_dataset, train_dataset
from common.input_error import InputError
from common.lenet5 import accuracy
from common.options import MODES, positive_int, seed_int
from common.output import counted, markdown_table
from mindspore import nn
from overflowing import ResNet, Transformer, mindcv_resnet18
from tqdm import tqdm

from ms_lossscale import DynamicLossScale, advise_float32, build_train_network

NETWORKS = {"transformer": Transformer, "resnet": ResNet, "mindcv-resnet18": mindcv_resnet18}


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train networks that overflow in float16 at every loss scale, ask which of their cells need "
        "float32, and train them as advised, and in float32 for comparison."
    )
    add = parser.add_argument
    add(
        "--networks",
        nargs="+",
        choices=NETWORKS,
        default=["transformer", "resnet"],
        help="networks to train; mindcv-resnet18 needs mindcv (default: transformer resnet)",
    )
    add_data_argument(parser)
    add("--images", type=positive_int, default=640, metavar="N", help="digits to train with (default: %(default)s)")
    add("--epochs", type=positive_int, default=3, help="epochs of each training (default: %(default)s)")
    add("--batch-size", type=positive_int, default=16, metavar="N", help="digits in a step (default: %(default)s)")
    add("--mode", choices=MODES, default="pynative", help="MindSpore's execution mode (default: %(default)s)")
    add("--seed", type=seed_int, default=0, help="seed of the weights and of the digits' order (default: %(default)s)")
    return parser


def make_cell(name, args, level):
    """Returns the network and its training cell."""
    mindspore.set_seed(args.seed)
    network = NETWORKS[name]()
    optimizer = nn.Adam(network.trainable_params(), learning_rate=3e-3)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    scale = None if level == "O0" else DynamicLossScale()
    return network, build_train_network(network, optimizer, loss, level=level, loss_scale_manager=scale).set_train()


def train(title, network, cell, args, digits):
    """Trains a cell. Returns the text for the table, and whether most steps were applied."""
    total = args.epochs * steps_per_epoch(digits, args.batch_size)
    with tqdm(total=total, desc=title, unit="step", leave=False) as bar:
        for epoch in range(1, args.epochs + 1):
            batches = train_dataset(digits, args.batch_size, args.seed, epoch)
            for images, labels in batches.create_tuple_iterator(num_epochs=1):
                cell(images, labels)
                bar.update()
    share = accuracy(network, test_dataset(digits))
    skipped = cell.counters()["skipped_steps"]
    return f"{100 * share:.1f} %, {skipped} of {total} skipped", 2 * skipped < total


def compare(name, args, digits):
    """Returns the network's row of the table, and whether the advice held."""
    print(f"== {name}, float16 at O3\n")
    batches = train_dataset(digits, args.batch_size, args.seed, 1).create_tuple_iterator(num_epochs=1)
    advice = advise_float32(make_cell(name, args, "O3")[1], [next(batches)])
    print(f"{advice}\n", flush=True)
    float32, _ = train(f"{name}, float32", *make_cell(name, args, "O0"), args, digits)
    float16, _ = train(f"{name}, float16", *make_cell(name, args, "O3"), args, digits)
    network, cell = make_cell(name, args, "O3")
    # As if the lines were pasted here.
    exec(advice.lines(), {"cell": cell})
    advised, trained = train(f"{name}, as advised", network, cell, args, digits)
    return [name, float32, float16, advised], advice.holds and trained


def main():
    parser = make_parser()
    args = parser.parse_args()
    if "mindcv-resnet18" in args.networks and importlib.util.find_spec("mindcv") is None:
        parser.error("argument --networks: mindcv-resnet18 needs mindcv; `make toolkits` installs it and runs this")
    mindspore.set_context(mode=MODES[args.mode])
    mindspore.set_device("CPU")
    try:
        digits = load_digits(args.data)
        # The digits may be sorted.
        chosen = np.random.default_rng(args.seed).permutation(len(digits.train_images))[: args.images]
        digits = digits._replace(train_images=digits.train_images[chosen], train_labels=digits.train_labels[chosen])
        steps_per_epoch(digits, args.batch_size)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    rows, held = zip(*(compare(name, args, digits) for name in args.networks))
    print(f"== Test accuracy after {counted(args.epochs, 'epoch', 'epochs')}, and the steps that were skipped\n")
    print(markdown_table(["network", "float32", "float16", "float16, as advised"], rows), end="")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
