"""
Trains this GAN with each policy for overflows, and compares lost updates and results.

    python examples/gan/policies.py [OPTION ...] [-- OPTION OF train.py ...]

Each policy is trained once for each seed, in a folder of its own. Finished runs are not made again; interrupted ones
continue after their last epoch. The time of a step is measured after the runs, in processes in which the policies take
turns. Prints a table in GitHub's Markdown, and writes it to the output folder, see --output.
"""

import argparse
import csv
import functools
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import base
from common.options import positive_int, seed_int
from common.output import markdown_table, replacing

TRAIN = Path(__file__).resolve().with_name("train.py")

SKIP, RETRIES, OWN_SCALES = ["--max-retries", "0"], ["--max-retries", "3"], ["--separate-scales"]
SIMULTANEOUS, ALTERNATING = ["--update", "simultaneous"], ["--update", "alternating"]
# The options of train.py.
POLICIES = {
    "simultaneous, skip": SIMULTANEOUS + SKIP,
    "simultaneous, skip, scales of their own": SIMULTANEOUS + SKIP + OWN_SCALES,
    "simultaneous, retries": SIMULTANEOUS + RETRIES,
    "simultaneous, retries, scales of their own": SIMULTANEOUS + RETRIES + OWN_SCALES,
    "alternating, skip": ALTERNATING + SKIP,
    "alternating, retries": ALTERNATING + RETRIES,
}
# How a policy handles a first scale that is too high is part of it.
BEGIN = ["--scale", "65536"]
# The columns with a value from each run, and its format.
COLUMNS = {
    "updates lost": ".0f",
    "in steps": ".0f",
    "retries": ".0f",
    "mean top-class probability": ".3f",
    "classes with more than 2 %": ".0f",
}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Train the GAN with each policy for overflows and several seeds, and print a table of lost updates "
        "and results. Finished runs in the output folder are not made again.",
        usage="%(prog)s [OPTION ...] [-- OPTION OF train.py ...]",
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="output/gan_policies", help="folder for the results (default: %(default)s)")
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY", help="rows of the table")
    add("--seeds", nargs="+", type=seed_int, default=[0, 1, 2], metavar="SEED", help="of the runs (default: 0 1 2)")
    add("--epochs", type=positive_int, default=12, metavar="N", help="of each run (default: %(default)s)")
    add("--rounds", type=positive_int, default=7, metavar="N", help="for the time of a step (default: %(default)s)")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.train = sys.argv[end + 1 :]
    return args


def result_of(args, policy, seed):
    """Returns a run's values of COLUMNS. Makes the run, or its rest, if the folder does not have it."""
    folder = Path(args.output, policy.replace(",", "").replace(" ", "-"), str(seed))
    options = [*BEGIN, *args.train, *POLICIES[policy], "--epochs", str(args.epochs), "--seed", str(seed)]
    if (folder / "result.json").exists():
        recorded = json.loads((folder / "result.json").read_text())
        if recorded["options"] != options:
            sys.exit(f"{folder} has a run with {shlex.join(recorded['options'])}, and not {shlex.join(options)}")
        return recorded["values"]
    print(f"{policy}, seed {seed}", file=sys.stderr)
    command = [sys.executable, str(TRAIN), *options, "--output", str(folder)]
    resume = ["--resume"] if (folder / "gan.ckpt").exists() else []
    printed = subprocess.run([*command, *resume], stdout=subprocess.PIPE, text=True)
    if printed.returncode:
        sys.exit(f"{policy}, seed {seed} failed with exit status {printed.returncode}")
    with open(folder / "steps.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lost, retries = (
        [[int(row[f"{network}_{what}"]) for network in ("discriminator", "generator")] for row in rows]
        for what in ("overflow", "retries")
    )
    # Simultaneous networks run again together, and both have the number.
    tried = sum(map(max, retries)) if SIMULTANEOUS[1] in options else sum(map(sum, retries))
    scores = (r"^Mean top-class probability: (\S+)$", r"^Classes with more than 2 %: (\d+) of 10$")
    values = [sum(map(sum, lost)), sum(map(any, lost)), tried if "retries" in policy else None]
    values += [float(re.search(score, printed.stdout, re.M)[1]) for score in scores]
    with replacing(folder / "result.json") as part:
        part.write_text(json.dumps({"options": options, "steps": len(rows), "values": values}))
    return values


def child(train, rounds, *policies):
    """Measures the seconds of the policies' steps, which take turns, and prints them as JSON."""
    from common.data import load_digits
    from common.ranks import start_ranks
    from options import make_parser, parse_arguments
    from train import make_cell, training_inputs

    def step(args):
        _, cell = make_cell(args)
        batches = itertools.cycle(list(training_inputs(digits, args, 1, ranks)))
        return lambda: cell(*next(batches))[0]

    arguments = {policy: parse_arguments(make_parser(), [*json.loads(train), *POLICIES[policy]]) for policy in policies}
    any_of_them = arguments[policies[0]]
    ranks, digits = start_ranks(any_of_them), load_digits(any_of_them.data)
    sides = {policy: functools.partial(step, args) for policy, args in arguments.items()}
    print(json.dumps(base.take_turns(sides, int(rounds))))


def seconds_of_steps(args):
    """Returns the median seconds of each policy's step, from processes of which each makes another policy first."""
    options = ["--child", json.dumps(args.train), args.rounds]
    runs = base.measured_in_turns(__file__, *options, sides=args.policies)
    return [statistics.median(itertools.chain(*(run["seconds"][policy] for run in runs))) for policy in args.policies]


def spread(values, form):
    """Returns the mean of the values and their range, as text."""
    if None in values:
        return "-"
    mean = statistics.mean(values)
    if min(values) == max(values):
        return f"{mean:{form}}"
    # The mean of counts may not be an integer.
    return f"{mean:{'.1f' if form == '.0f' else form}} ({min(values):{form}} to {max(values):{form}})"


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    args = parse_arguments()
    results = {policy: [result_of(args, policy, seed) for seed in args.seeds] for policy in args.policies}
    seconds, rows = seconds_of_steps(args), []
    for (policy, runs), its in zip(results.items(), seconds):
        columns = (spread(values, form) for values, form in zip(zip(*runs), COLUMNS.values()))
        rows.append([policy, *columns, f"{its / seconds[0]:.2f}"])
    text = (
        f"`python {shlex.join(['examples/gan/policies.py', *sys.argv[1:]])}` (MindSpore {version('mindspore')}): the "
        f"mean over the seeds {', '.join(map(str, args.seeds))}, and in brackets from the least to the most; the time "
        "of a step in which nothing overflows, to that of the first line.\n\n"
    ) + markdown_table(["policy", *COLUMNS, "time of a step"], rows)
    with replacing(Path(args.output, "gan_policies.md")) as part:
        part.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
