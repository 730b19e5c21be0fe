"""
Trains the GAN of examples/gan with each policy for overflows, and compares lost updates and results.

    python benchmarks/gan_policies.py [OPTION ...] [-- OPTION OF train.py ...]

Each policy is trained once for each seed, in a folder of its own. Finished runs are not made again; interrupted ones
continue after their last epoch. The time of a step is measured after the runs, in processes in which the policies take
turns. Prints a table in GitHub's Markdown, and writes it to the output folder, see --output.
Exit status: 0, or 1 if a run failed, or 2 if the arguments are wrong.
"""

import argparse
import csv
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import before_mindspore  # noqa: F401
from bench import machine
from common.options import positive_int, seed_int
from common.output import markdown_table, replacing
from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent
TRAIN = FOLDER.parent / "examples" / "gan" / "train.py"

SKIP, RETRIES, OWN_SCALES = ["--max-retries", "0"], ["--max-retries", "3"], ["--separate-scales"]
SIMULTANEOUS, ALTERNATING = ["--update", "simultaneous"], ["--update", "alternating"]

# The initial scale of every run: how a policy handles a scale that is too high is part of it.
BEGIN = ["--scale", "65536"]

# The name of each in the table, and its options of train.py.
POLICIES = {
    "simultaneous-skip": ("simultaneous, skip", SIMULTANEOUS + SKIP),
    "simultaneous-skip-own-scales": ("simultaneous, skip, scales of their own", SIMULTANEOUS + SKIP + OWN_SCALES),
    "simultaneous-retries": ("simultaneous, retries", SIMULTANEOUS + RETRIES),
    "simultaneous-retries-own-scales": (
        "simultaneous, retries, scales of their own",
        SIMULTANEOUS + RETRIES + OWN_SCALES,
    ),
    "alternating-skip": ("alternating, skip", ALTERNATING + SKIP),
    "alternating-retries": ("alternating, retries", ALTERNATING + RETRIES),
}

# Options of train.py that this program sets itself.
OWN_OPTIONS = ("--update", "--max-retries", "--separate-scales", "--seed", "--epochs", "--output", "--resume")

# Printed by train.py at its end.
SCORES = {
    "mean_top_class_probability": (float, r"^Mean top-class probability: (\S+)$"),
    "classes": (int, r"^Classes with more than 2 %: (\d+) of 10$"),
}

# The columns with a value from each run, and its format.
COLUMNS = {
    "lost_updates": ("updates lost", ".0f"),
    "steps_with_a_lost_update": ("in steps", ".0f"),
    "retries": ("retries", ".0f"),
    "mean_top_class_probability": ("mean top-class probability", ".3f"),
    "classes": ("classes with more than 2 %", ".0f"),
}

DEFAULT_EPOCHS, DEFAULT_SEEDS = 48, [0, 1, 2]


class InputError(Exception):
    """The arguments or the output folder are wrong; the message says how in one line."""


class RunError(Exception):
    """A run failed; the message says in one line which one, and where its output is."""


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train the GAN of examples/gan with each policy for overflows and several seeds, and print a table "
        "of lost updates and results. Finished runs in the output folder are not made again.",
        usage="%(prog)s [OPTION ...] [-- OPTION OF examples/gan/train.py ...]",
        epilog="Options after -- go to each run of examples/gan/train.py, for instance: -- --filters 8 --data DIR. "
        "Exit status: 0, or 1 if a run failed, or 2 if the arguments are wrong.",
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="output/gan_policies", help="folder for the results (default: %(default)s)")
    add(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=list(POLICIES),
        metavar="POLICY",
        help=f"rows of the table, from {', '.join(POLICIES)} (default: all)",
    )
    add(
        "--seeds",
        nargs="+",
        type=seed_int,
        default=DEFAULT_SEEDS,
        metavar="SEED",
        help="train each policy once with each seed (default: 0 1 2)",
    )
    add("--epochs", type=positive_int, default=DEFAULT_EPOCHS, metavar="N", help="of each run (default: %(default)s)")
    add("--jobs", type=positive_int, default=1, metavar="N", help="number of runs at once (default: %(default)s)")
    add(
        "--time",
        action="store_true",
        help="measure the time of a step again, even if the output folder has it; the result is only meaningful if "
        "nothing else runs on the machine",
    )
    add("--rounds", type=positive_int, default=7, metavar="N", help="for the time of a step (default: %(default)s)")
    return parser


def parse_arguments(parser, argv):
    """Returns the arguments; `train` has those after --."""
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.train = argv[end + 1 :]
    for option in args.train:
        # train.py accepts any beginning of an option's name.
        name = option.partition("=")[0]
        if len(name) > 2 and any(own.startswith(name) for own in OWN_OPTIONS):
            parser.error(f"after --: {option} is set for each run by this program, so it can't be passed on")
    args.policies, args.seeds = list(dict.fromkeys(args.policies)), list(dict.fromkeys(args.seeds))
    return args


class Run(NamedTuple):
    """One training: a policy with a seed, its folder, and train.py's options except --output and --resume."""

    policy: str
    seed: int
    folder: Path
    options: list

    def __str__(self):
        return f"{self.policy}, seed {self.seed}"

    @property
    def record(self):
        """The file with its options, written before it begins, and its result once it is finished."""
        return self.folder / "run.json"

    @property
    def stdout(self):
        return self.folder / "stdout.txt"

    @property
    def stderr(self):
        return self.folder / "stderr.txt"

    def epochs_done(self):
        return len(list(self.folder.glob("epoch-*.png")))

    def result(self):
        """Returns the result, None if it is not finished. Raises an InputError if the run there had other options."""
        try:
            recorded = json.loads(self.record.read_text())
        except FileNotFoundError:
            return None
        if recorded["options"] != self.options:
            raise InputError(
                f"{self.folder} has a run with the options {shlex.join(recorded['options'])}, and not "
                f"{shlex.join(self.options)}: pass the same as then, or another --output"
            )
        return recorded["result"]

    def write(self, result):
        write_json(self.record, {"options": self.options, "result": result})


def make_runs(args):
    runs = []
    for policy in args.policies:
        for seed in args.seeds:
            options = [*BEGIN, *args.train, *POLICIES[policy][1], "--epochs", str(args.epochs), "--seed", str(seed)]
            runs.append(Run(policy, seed, Path(args.output, policy, str(seed)), options))
    return runs


def write_json(path, value):
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=1))


def start(run):
    """Starts the training in a process; an interrupted one continues."""
    run.folder.mkdir(parents=True, exist_ok=True)
    run.write(None)
    command = [sys.executable, str(TRAIN), *run.options, "--output", str(run.folder)]
    if (run.folder / "gan.ckpt").exists():
        command.append("--resume")
    with open(run.stdout, "w") as stdout, open(run.stderr, "w") as stderr:
        return subprocess.Popen(command, stdout=stdout, stderr=stderr)


def finish(run, status):
    """Reads and saves the result of a training that has ended."""
    if status:
        raise RunError(f"{run} failed with exit status {status}, see {run.stderr}")
    scores = {}
    for name, (convert, pattern) in SCORES.items():
        found = re.search(pattern, run.stdout.read_text(), re.M)
        if not found:
            raise RunError(f"{run} failed: it printed no score, see {run.stdout}")
        scores[name] = convert(found.group(1))
    run.write({**read_steps(run.folder / "steps.csv"), **read_counters(run.folder / "gan.ckpt"), **scores})


def read_steps(path):
    """Reads from a run's table how many updates were lost, for both networks, and in how many steps."""
    with open(path, newline="") as file:
        lost = [int(row["discriminator_overflow"]) + int(row["generator_overflow"]) for row in csv.DictReader(file)]
    return {"steps": len(lost), "lost_updates": sum(lost), "steps_with_a_lost_update": sum(map(bool, lost))}


def read_counters(path):
    """Reads the counters of a checkpoint, summed over the networks; `retries` is None if it does not count them."""
    import mindspore

    counters = {"applied_steps": None, "skipped_steps": None, "retries": None}
    for name, value in mindspore.load_checkpoint(str(path)).items():
        counter = name.rpartition("step_counters.")[2]
        if counter in counters and counter != name:
            counters[counter] = (counters[counter] or 0) + int(value.asnumpy())
    return counters


def train_all(runs, jobs, epochs):
    """Makes the runs, `jobs` at once. Returns a message for each one that failed."""
    waiting, running, failures = list(runs), {}, []
    total = len(runs) * epochs
    with tqdm(total=total, unit="epoch", dynamic_ncols=True, initial=sum(map(Run.epochs_done, runs))) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running[waiting[0].folder] = waiting[0], start(waiting[0])
                    del waiting[0]
                bar.set_description_str("; ".join(str(run) for run, _ in running.values()), refresh=False)
                time.sleep(1)
                bar.update(sum(map(Run.epochs_done, runs)) - bar.n)
                for folder, (run, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[folder]
                        try:
                            finish(run, process.returncode)
                        except RunError as error:
                            failures.append(str(error))
        finally:
            for _, process in running.values():
                process.terminate()
                process.wait()
    return failures


def measure_time(args, path):
    """
    Measures the seconds of the policies' steps, in as many processes as policies. Each builds another policy first,
    since the first is at an advantage. The results are kept in the file `path`.
    """
    options = {policy: [*args.train, *POLICIES[policy][1]] for policy in args.policies}
    if not args.time and path.exists():
        measured = json.loads(path.read_text())
        if all(measured["options"].get(policy) == its for policy, its in options.items()):
            return measured
    runs = []
    for i in tqdm(range(len(options)), desc="time of a step", unit="process", dynamic_ncols=True):
        command = [sys.executable, str(FOLDER / "gan_steps.py"), json.dumps(options)]
        command += ["--rounds", str(args.rounds), "--first", str(i)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            log = path.with_suffix(".txt")
            log.write_text(result.stderr)
            raise RunError(f"the time of a step could not be measured, see {log}")
        runs.append(json.loads(result.stdout.splitlines()[-1]))
    measured = {"options": options, "machine": machine(), "runs": runs}
    write_json(path, measured)
    return measured


def markdown(results, measured):
    """Returns the table. `results` has, for each policy, the results of its seeds."""
    header = ["policy", *(title for title, _ in COLUMNS.values()), "time of a step"]
    rows = []
    seconds = {
        policy: statistics.median(itertools.chain(*(run["seconds"][policy] for run in measured["runs"])))
        for policy in results
    }
    first = seconds[next(iter(seconds))]
    for policy, its in results.items():
        cells = [spread([result[name] for result in its], form) for name, (_, form) in COLUMNS.items()]
        rows.append([POLICIES[policy][0], *cells, f"{seconds[policy] / first:.2f}"])
    return markdown_table(header, rows)


def spread(values, form):
    """Returns the mean of the values and their range, as text."""
    if None in values:
        return "-"
    mean = statistics.mean(values)
    if min(values) == max(values):
        return f"{mean:{form}}"
    # The mean of counts may not be an integer.
    mean_form = ".1f" if form == ".0f" else form
    return f"{mean:{mean_form}} ({min(values):{form}} to {max(values):{form}})"


def command_of(args):
    """Returns the command that makes this table."""
    command = ["python", "benchmarks/gan_policies.py"]
    if args.policies != list(POLICIES):
        command += ["--policies", *args.policies]
    if args.seeds != DEFAULT_SEEDS:
        command += ["--seeds", *map(str, args.seeds)]
    if args.epochs != DEFAULT_EPOCHS:
        command += ["--epochs", str(args.epochs)]
    if args.train:
        command += ["--", *args.train]
    return shlex.join(command)


def caption(args, results, measured):
    steps, seeds = results[args.policies[0]][0]["steps"], ", ".join(map(str, args.seeds))
    return (
        f"`{command_of(args)}` (MindSpore {measured['machine']['mindspore']}, {measured['machine']['cores']} CPU "
        f"cores): {steps:,} steps, the mean over the seeds {seeds}, and in brackets from the least to the most; "
        f"the time of a step in which nothing overflows, to that of the first line.\n\n"
    )


def compare(args):
    runs = make_runs(args)
    unfinished = [run for run in runs if run.result() is None]
    try:
        failures = train_all(unfinished, args.jobs, args.epochs) if unfinished else []
        if failures:
            raise RunError("\n".join(failures))
        measured = measure_time(args, Path(args.output, "time.json"))
    except OSError as error:
        raise InputError(f"can't write to the output folder: {error}") from None
    results = {policy: [run.result() for run in runs if run.policy == policy] for policy in args.policies}
    text = caption(args, results, measured) + markdown(results, measured)
    with replacing(Path(args.output, "gan_policies.md")) as part:
        part.write_text(text)
    print(text, end="")
    return 0


def main():
    parser = make_parser()
    args = parse_arguments(parser, sys.argv[1:])
    try:
        return compare(args)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except RunError as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "Interrupted: the same command continues after each run's last epoch\n")


if __name__ == "__main__":
    sys.exit(main())
