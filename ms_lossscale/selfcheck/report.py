"""What the command says: a table, and what it depends on."""

import os
import platform

import mindspore
import numpy

import ms_lossscale
from ms_lossscale._output import text_table
from ms_lossscale.overflow_detector import default_overflow_detector

# What decides how MindSpore computes and what it tells of an overflow.
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
