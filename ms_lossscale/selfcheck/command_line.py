"""The command: its options, the choice of checks, its exit status."""

import argparse
import os
import sys
from pathlib import Path

import mindspore

from ms_lossscale.selfcheck.checks import CHECKS
from ms_lossscale.selfcheck.device import MODES, CouldNotRun
from ms_lossscale.selfcheck.report import Report
from ms_lossscale.selfcheck.worker import Worker

ALL_HOLD, DOES_NOT_HOLD, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130


def make_parser():
    parser = argparse.ArgumentParser(
        prog="python -m ms_lossscale.selfcheck",
        description="Checks on this device what ms_lossscale promises. Under msrun it checks the ranks, too.",
        epilog="Exit status: 0 if all holds, 1 if something does not, 2 if nothing could be checked, 130 after Ctrl-C.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="checks, or beginnings of their names (default: all)")
    add("--quick", action="store_true", help="only the checks that matter most")
    add("--device", metavar="DEVICE", help="CPU, GPU or Ascend (default: what MindSpore chooses)")
    add("--mode", choices=(*MODES, "both"), default="both", help="MindSpore's mode (default: %(default)s)")
    add("--emulate", action="store_true", help="emulate an NPU in saturation mode, on CPU")
    add("--timeout", type=seconds, default=120.0, metavar="SECONDS", help="for each check (default: %(default)g)")
    add("--json", metavar="FILE", help="write the results to this file, too; of several ranks the first does")
    add("--list", action="store_true", help="only list the checks and their claims")
    return parser


def seconds(text):
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


def main(arguments=None):
    """Runs the command. Returns its exit status."""
    args = make_parser().parse_args(arguments)
    report = None
    try:
        checks = chosen(args.names, args.quick)
        if args.list:
            print("\n".join(f"{check.name}: {check.claim}" for check in checks))
            return ALL_HOLD
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            # msrun starts its scheduler with the same command, which serves the ranks until they end.
            mindspore.communication.init()
            return ALL_HOLD
        if args.emulate and args.device not in (None, "CPU"):
            raise CouldNotRun(f"--emulate is for the CPU, and not for {args.device}")
        if args.json is not None and not Path(args.json).resolve().parent.is_dir():
            raise CouldNotRun(f"there is no folder for --json {args.json}")
        report = Report(args.json)
        run(checks, args, report)
    except (CouldNotRun, OSError) as error:
        print(f"\nms_lossscale.selfcheck: error: {error}", file=sys.stderr)
        return DOES_NOT_HOLD if report is not None and report.failed else COULD_NOT_RUN
    except KeyboardInterrupt:
        if report is not None:
            report.end_early()
        return INTERRUPTED
    report.end()
    return DOES_NOT_HOLD if report.failed else ALL_HOLD


def chosen(names, quick):
    """Returns the checks whose names begin with one of these."""
    for name in names:
        if not any(check.name.startswith(name) for check in CHECKS):
            raise CouldNotRun(f"no check has the name {name!r} or a name that begins with it. --list prints all names.")
    checks = [check for check in CHECKS if not names or check.name.startswith(tuple(names))]
    return [check for check in checks if check.quick or not quick]


def run(checks, args, report):
    """Runs each check in each mode, and reports the results."""
    modes = MODES if args.mode == "both" else (args.mode,)
    with Worker("CPU" if args.emulate else args.device, args.emulate, args.timeout) as worker:
        left_out = [check for check in checks if not worker.surroundings.has.issuperset(check.needs)]
        pairs = [(check, mode) for mode in modes for check in checks if check not in left_out]
        if not pairs:
            raise CouldNotRun(f"none of these checks is for this device: {', '.join(check.name for check in left_out)}")
        report.begin(worker.surroundings, pairs, left_out)
        for check, mode in pairs:
            report.begin_check(check, mode)
            report.end_check(worker.result_of(check, mode))
