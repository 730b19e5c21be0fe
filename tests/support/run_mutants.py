"""
Runs the tests against each mutant, and tells which mutants survive.

The first test that fails kills a mutant. Those that should fail run first; the others run only if none of them does.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.mutants import MUTANTS
from support.mutants.mutant import ROOT

# argparse exits with 2 for wrong arguments.
ENOUGH_DIE, TOO_MANY_SURVIVE = 0, 1
_SHARE_TO_DIE = 0.95
# Tests that no mutant of the package can fail, tests of texts for readers, and those of the mutants themselves.
_NOT_CORE = ("docs", "examples_*", "mutants", "package", "pictures", "plot_scale", "selfcheck", "site", "translations")
# Seconds. Ranks wait for ever if one of them has taken another branch.
_LIMIT_OF_FIRST, _LIMIT_OF_REST = 400, 5400
_QUICK, _LONG = "not long and not release", "long and not release"
_PASSED, _FAILED, _NO_TESTS = 0, 1, 5
_HEADER = "| mutant | result | by | seconds |\n|---|---|---|---|\n"
_LINE = re.compile(r"\| (?P<mutant>.*) \| (?P<result>.*) \| (?P<by>.*) \| (?P<seconds>\d+) \|")


class Result(NamedTuple):
    """The fate of a mutant: "killed", "survived" or "error", and the test that showed it."""

    mutant: str
    result: str
    by: str
    seconds: int


def make_parser():
    parser = argparse.ArgumentParser(
        prog="make mutants",
        description=__doc__,
        epilog=f"Exit status: 0 if {100 * _SHARE_TO_DIE:g} percent die, and all but those that are known to survive; "
        "1 if not; 2 if an argument is wrong.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="mutants, or words of their names or files (default: all)")
    add("--list", action="store_true", help="only list the mutants and their files")
    add("--jobs", type=int, default=2, metavar="N", help="how many at a time, each on one core (default: %(default)s)")
    add("--first", action="store_true", help="run only the test files that should fail")
    add("--all-tests", action="store_true", help="run the long tests, too, which `make test` leaves out")
    add("--continue", action="store_true", dest="goes_on", help="keep what the table has, and run the others")
    add("--table", type=Path, default=ROOT / "output" / "mutants.md", metavar="FILE", help="(default: %(default)s)")
    return parser


def main(arguments=None):
    """Runs the command. Returns its exit status."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if _is_chosen(mutant, args.names)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(map(repr, args.names))} in its name or file; --list tells them")
    if args.jobs < 1:
        parser.error(f"--jobs must be >= 1, but is {args.jobs}")
    if args.list:
        print("\n".join(f"{mutant.name}: {mutant.file}" for mutant in chosen))
        return ENOUGH_DIE
    results = _read(args.table) if args.goes_on else {}
    to_run = [mutant for mutant in chosen if mutant.name not in results]
    pool = ThreadPoolExecutor(args.jobs)
    try:
        runs = [pool.submit(_run, mutant, args.all_tests, args.first) for mutant in to_run]
        for i, run in enumerate(as_completed(runs)):
            result = run.result()
            results[result.mutant] = result
            _write(args.table, results)
            print(f"{i + 1}/{len(runs)} {result.mutant}: {result.result} {result.by} {result.seconds} s", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return _told([results[mutant.name] for mutant in chosen], args.table)


def _is_chosen(mutant, words):
    return not words or any(word in mutant.name or word in mutant.file for word in words)


def _told(results, table):
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    alive = [result for result in results if result.result != "killed"]
    for result in alive:
        print(f"{result.result}: {result.mutant}: {result.by or by_name[result.mutant].survives}")
    dead = len(results) - len(alive)
    print(f"{dead} of {len(results)} died. {table} has the table.")
    is_known = all(result.result == "survived" and by_name[result.mutant].survives for result in alive)
    return ENOUGH_DIE if is_known and dead >= _SHARE_TO_DIE * len(results) else TOO_MANY_SURVIVE


def _run(mutant, all_tests, only_first):
    begin, result, by = time.monotonic(), "survived", ""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        mutant.copy_tree(folder)
        for arguments, limit in _runs(mutant, folder, all_tests, only_first):
            result, by = _pytest(folder, arguments, limit)
            if result != "survived":
                break
    return Result(mutant.name, result, by, round(time.monotonic() - begin))


def _runs(mutant, folder, all_tests, only_first):
    """Yields what pytest runs, one after the other, with the time limit of each."""
    first = [f"tests/{name}" for name in mutant.first]
    others = [*first, *(f"tests/test_{name}.py" for name in _NOT_CORE)]
    rest = ["tests", "ms_lossscale", *(f"--ignore-glob={folder}/{path}" for path in others)]
    for mark in (_QUICK, _LONG) if all_tests else (_QUICK,):
        yield ["-m", mark, *first], _LIMIT_OF_FIRST
    if not only_first:
        yield ["-m", f"({_QUICK}) or ({_LONG})" if all_tests else _QUICK, *rest], _LIMIT_OF_REST


def _pytest(folder, arguments, limit):
    """Runs tests up to the first that fails. Returns "killed", "survived" or "error", and what showed it."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *arguments]
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            return "killed", f"the time limit of {limit} s"
    if process.returncode == _FAILED:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return "killed", failed.group(1) if failed else "a test"
    if process.returncode in (_PASSED, _NO_TESTS):
        return "survived", ""
    return "error", f"pytest's status {process.returncode}: {' '.join(output.split()[-20:])}"


def _read(table):
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    found = [match.groupdict() for match in map(_LINE.fullmatch, lines) if match]
    return {each["mutant"]: Result(**{**each, "seconds": int(each["seconds"])}) for each in found}


def _write(table, results):
    table.parent.mkdir(parents=True, exist_ok=True)
    part = table.with_suffix(".part")
    rows = (f"| {' | '.join(map(str, result)).replace(chr(10), ' ')} |\n" for result in results.values())
    part.write_text(_HEADER + "".join(rows), encoding="utf-8")
    part.replace(table)


if __name__ == "__main__":
    sys.exit(main())
