"""The command: its options, its progress line, its table, its exit status."""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path

import mindspore
import numpy

import ms_lossscale
from ms_lossscale._output import text_table, write_text
from ms_lossscale.overflow_detector import default_overflow_detector
from ms_lossscale.selfcheck.checks import CHECKS
from ms_lossscale.selfcheck.claim import DoesNotHold
from ms_lossscale.selfcheck.device import MODES, Device, has_ranks

# What decides how MindSpore computes and what it makes of an overflow.
VARIABLES = (
    "MS_ASCEND_CHECK_OVERFLOW_MODE",
    "ASCEND_GLOBAL_LOG_LEVEL",
    "CUDA_VISIBLE_DEVICES",
    "DEVICE_ID",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ONEDNN_MAX_CPU_ISA",
    "MS_WORKER_NUM",
    "MS_ROLE",
)

ALL_HOLD, DOES_NOT_HOLD, COULD_NOT_RUN = 0, 1, 2


class CouldNotRun(Exception):
    """Nothing was checked."""


def make_parser():
    parser = argparse.ArgumentParser(
        prog="python -m ms_lossscale.selfcheck",
        description="Checks on this device what ms_lossscale promises. Under msrun it checks the ranks, too.",
        epilog="Exit status: 0 if all holds, 1 if something does not, 2 if nothing could be checked.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="checks, or beginnings of their names (default: all)")
    add("--device", metavar="DEVICE", help="CPU, GPU or Ascend (default: what MindSpore chooses)")
    add("--mode", choices=(*MODES, "both"), default="both", help="MindSpore's mode (default: %(default)s)")
    add("--emulate", action="store_true", help="emulate an NPU in saturation mode, on CPU")
    add("--json", metavar="FILE", help="write the results to this file, too; of several ranks the first does")
    add("--list", action="store_true", help="only list the checks and their claims")
    return parser


def main(arguments=None):
    """Runs the command. Returns its exit status."""
    args = make_parser().parse_args(arguments)
    try:
        checks = chosen(args.names)
        if args.list:
            print("\n".join(f"{check.name}: {check.claim}" for check in checks))
            return ALL_HOLD
        if args.json is not None and not Path(args.json).resolve().parent.is_dir():
            raise CouldNotRun(f"there is no folder for --json {args.json}")
        devices = start(args)
        results, left_out = run(checks, devices)
        if not results:
            raise CouldNotRun(f"none of these checks is for this device: {', '.join(check.name for check in left_out)}")
    except CouldNotRun as error:
        print(f"ms_lossscale.selfcheck: error: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    print(table(results))
    print(surroundings(devices[0], left_out))
    held = all(result["held"] for result in results)
    if args.json is not None and (not has_ranks() or mindspore.communication.get_rank() == 0):
        described = {"held": held, "checks": results, "device": str(devices[0])}
        described |= {"versions": versions(), "environment": environment()}
        write_text(args.json, json.dumps(described, indent=1))
    return ALL_HOLD if held else DOES_NOT_HOLD


def chosen(names):
    """The checks whose names begin with one of these."""
    for name in names:
        if not any(check.name.startswith(name) for check in CHECKS):
            raise CouldNotRun(f"no check is called {name!r}, or begins so. --list names them.")
    return [check for check in CHECKS if not names or check.name.startswith(tuple(names))]


def start(args):
    """Sets the device, and returns it in each mode to check."""
    if args.emulate and args.device not in (None, "CPU"):
        raise CouldNotRun(f"--emulate is for the CPU, and not for {args.device}")
    target = "CPU" if args.emulate else args.device
    try:
        if target is not None:
            mindspore.set_device(target)
        target = mindspore.get_context("device_target")
        # Only now it is known whether this MindSpore can compute there.
        (mindspore.Tensor([1.0]) + 1.0).asnumpy()
        if has_ranks():
            mindspore.communication.init()
    except (RuntimeError, ValueError, TypeError) as error:
        raise CouldNotRun(f"MindSpore can't use the device {target}: {str(error).splitlines()[0]}") from None
    modes = MODES if args.mode == "both" else (args.mode,)
    return [Device(target, mode, args.emulate) for mode in modes]


def run(checks, devices):
    """Runs each check on each device. Returns the results, and the checks that are for others."""
    results, left_out = [], []
    pairs = [(check, device) for device in devices for check in checks]
    for i, (check, device) in enumerate(pairs):
        progress(f"{i + 1}/{len(pairs)} {device.mode}: {check.name}")
        with device.in_use():
            if not all(getattr(device, need) for need in check.needs):
                if check not in left_out:
                    left_out.append(check)
                continue
            results.append(result_of(check, device))
    progress("")
    return results, left_out


def result_of(check, device):
    """Runs one check."""
    begin, message = time.perf_counter(), ""
    try:
        check.run(device)
    except DoesNotHold as error:
        message = str(error)
    except Exception as error:
        # MindSpore appends where in its own sources an error came from.
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        traceback.print_exc()
    return {
        "name": check.name,
        "claim": check.claim,
        "mode": device.mode,
        "held": not message,
        "seconds": round(time.perf_counter() - begin, 3),
        "message": message and f"On this device ({device}) in {device.mode} mode: {message}",
    }


def progress(text):
    """Shows a line in the place of the last one, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def table(results):
    """What was checked, in which mode, whether it held, and how long it took; below it what did not, and why."""
    rows = [
        [result["name"], result["mode"], "held" if result["held"] else "NOT HELD", f"{result['seconds']:.1f}"]
        for result in results
    ]
    lines = [text_table(["check", "mode", "", "seconds"], rows), ""]
    for result in results:
        if not result["held"]:
            lines += [f"{result['name']}: {result['claim']}", f"    {result['message']}", ""]
    failed = sum(not result["held"] for result in results)
    if failed:
        lines += [f"{failed} of {len(results)} did not hold. Please report this, with all that is printed here."]
    else:
        lines += [f"All {len(results)} held."]
    return "\n".join(lines)


def surroundings(device, left_out):
    """Versions, device, variables, which detector is chosen, and which checks are for other devices."""
    with device.in_use():
        detector, has_register = type(default_overflow_detector()).__name__, device.has_register
    becomes = "65504, which only the status register tells" if has_register else "inf, which the gradients show"
    lines = [", ".join(f"{name} {version}" for name, version in versions().items())]
    lines += [f"Device: {device} ({chip(device.target)})"]
    lines += [f"{name}={value}" for name, value in environment().items()]
    lines += [f"Overflow detector: {detector}, since MindSpore says that 70000 in float16 becomes {becomes} here"]
    if left_out:
        lines += [f"Not for this device: {', '.join(check.name for check in left_out)}"]
    return "\n".join(lines)


def versions():
    """Of all that is at work here."""
    return {
        "ms_lossscale": ms_lossscale.__version__,
        "mindspore": mindspore.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def environment():
    """The variables that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def chip(target):
    """What the device calls itself."""
    if target == "CPU":
        return platform.processor() or platform.machine()
    try:
        return mindspore.hal.get_device_name(0, target)
    except (AttributeError, RuntimeError, ValueError):
        return "unknown chip"
