"""
Measures steps of the GAN example with several settings, which take turns, and prints the result as JSON. It is started
by `gan_policies.py`.

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

import train
from common.data import load_digits
from common.ranks import start_ranks
from options import make_parser, parse_arguments


def _step(args, digits, ranks):
    """Returns a function that makes one step with the next batch, and returns a tensor to wait for."""
    _, cell = train.make_cell(args)
    batches = itertools.cycle(list(train.training_inputs(digits, args, 1, ranks)))
    return lambda: cell(*next(batches))[0]


def main():
    parser = argparse.ArgumentParser(description="Measure steps of the GAN example and print them as JSON.")
    parser.add_argument("options", type=json.loads, metavar="JSON", help="lists of train.py's options by name")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the one to build first")
    own = parser.parse_args()
    example = make_parser()
    arguments = {name: parse_arguments(example, options) for name, options in own.options.items()}
    any_of_them = next(iter(arguments.values()))
    ranks, digits = start_ranks(any_of_them), load_digits(any_of_them.data)
    sides = {name: functools.partial(_step, args, digits, ranks) for name, args in arguments.items()}
    print(json.dumps(measure.measure(sides, own.rounds, own.first)))


if __name__ == "__main__":
    main()
