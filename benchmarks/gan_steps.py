"""
Measures the steps of the GAN example under several settings, which take turns, and prints what it measured as JSON;
`gan_policies.py` starts it.

    python benchmarks/gan_steps.py JSON [--rounds N] [--first N]
"""

import argparse
import functools
import itertools
import json
import sys
from pathlib import Path

import measure

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "gan"))

import numpy as np
import train
from mindspore import Tensor


def _arguments(options):
    """The example's arguments, as if the options had been passed to it."""
    parser = train.make_parser()
    parser.parse_args = functools.partial(parser.parse_args, list(map(str, options)))
    return train.parse_arguments(parser)


def _batches(args):
    """An epoch of digits and noise."""
    rng = np.random.default_rng(args.seed)
    dataset = train.train_dataset(train.load_digits(args.data), args.batch_size, args.seed, epoch=1)
    for images, _ in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        noise = rng.standard_normal((args.batch_size, args.latent), dtype=np.float32)
        yield Tensor(2 * images - 1), Tensor(noise)


def _step(args):
    """Makes one step with the next batch, and returns a tensor to wait for."""
    _, cell = train.make_cell(args)
    batches = itertools.cycle(list(_batches(args)))
    return lambda: cell(*next(batches))[0]


def main():
    parser = argparse.ArgumentParser(description="Measure steps of the GAN example and print them as JSON.")
    parser.add_argument("options", type=json.loads, metavar="JSON", help="from a name to a list of train.py's options")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="build this one first, by its number")
    own = parser.parse_args()
    arguments = {name: _arguments(options) for name, options in own.options.items()}
    train.join_ranks(next(iter(arguments.values())))
    sides = {name: functools.partial(_step, args) for name, args in arguments.items()}
    print(json.dumps(measure.measure(sides, own.rounds, own.first)))


if __name__ == "__main__":
    main()
