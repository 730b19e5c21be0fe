"""Prints and writes the results while the self-check runs, so that an interrupted run has shown its own."""

import importlib.metadata
import json
import os
import platform
from functools import partial

import mindspore
import numpy

import ms_lossscale
from ms_lossscale._output import counted, write_text

# They decide how MindSpore computes and treats overflows. The first is shown even if it is not set.
VARIABLES = (
    "MS_ASCEND_CHECK_OVERFLOW_MODE",
    "MS_DEV_RUNTIME_CONF",
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_GLOBAL_LOG_LEVEL",
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "DEVICE_ID",
    "RANK_TABLE_FILE",
    "GLOG_v",
    "ONEDNN_MAX_CPU_ISA",
    "MS_WORKER_NUM",
    "MS_ROLE",
)

say = partial(print, flush=True)


class CheckReport:
    """The report of one run, printed and, if it has a path, written to a JSON file."""

    def __init__(self, path):
        self._path = path
        self._versions = {
            "ms_lossscale": ms_lossscale.__version__,
            "mindspore": mindspore.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        }
        self._environment = {
            name: os.environ.get(name, "not set") for name in VARIABLES if name in os.environ or name == VARIABLES[0]
        }
        self._device = ""
        self._pairs = []
        self.results = []
        say(", ".join(f"{name} {version}" for name, version in self._versions.items()))
        say("\n".join(f"{name}: {value}" for name, value in self._environment.items()))

    @property
    def failed(self):
        """The results of the checks that did not hold."""
        return [result for result in self.results if not result["held"]]

    def begin(self, surroundings, pairs, left_out):
        """Shows the surroundings of the worker, and which checks will run in which modes."""
        self._device, self._pairs = surroundings.device, pairs
        if surroundings.rank > 0:
            self._path = None
        becomes = (
            "65504, which only the status register tells"
            if "has_register" in surroundings.has
            else "inf, which the gradients show"
        )
        say(f"Device: {surroundings.device} ({surroundings.chip})")
        say(
            f"Overflow detector: {surroundings.detector}, since MindSpore says that 70000 in float16 becomes {becomes} "
            f"here"
        )
        if left_out:
            say(f"Not for this device: {', '.join(check.name for check in left_out)}")
        say()
        self._write()

    def begin_check(self, check, mode):
        """Begins the row of a check, before it runs."""
        width = max(len(check.name) for check, _ in self._pairs)
        say(f"{len(self.results) + 1:2}/{len(self._pairs)}  {check.name.ljust(width)}  {mode:8}  ", end="")

    def end_check(self, result):
        """Ends its row."""
        say(f"{'held' if result['held'] else 'NOT HELD':8} {result['seconds']:7.1f} s")
        if not result["held"]:
            result["message"] = f"On this device ({self._device}) in {result['mode']} mode: {result['message']}"
            say(f"    {result['claim']}\n    {result['message']}")
        self.results.append(result)
        self._write()

    def end(self):
        """Shows how the run ended."""
        say()
        if not self.failed:
            say(f"All {len(self.results)} held.")
            return
        names = ", ".join(dict.fromkeys(result["name"] for result in self.failed))
        say(f"{len(self.failed)} of {len(self.results)} did not hold: {names}")
        address = address_for_reports()
        say(f"Please report this, with all that is printed here{address and f': {address}'}.")

    def end_early(self):
        """Shows the results of a run that was interrupted."""
        ran = f"{len(self.results)} of {counted(len(self._pairs), 'check', 'checks')}"
        say(f"\n\nInterrupted: {ran} ran, {len(self.failed)} did not hold.")

    def _write(self):
        if self._path is None:
            return
        has_ended = len(self.results) == len(self._pairs)
        content = {
            "held": has_ended and not self.failed,
            "checks": self.results,
            "device": self._device,
            "versions": self._versions,
            "environment": self._environment,
        }
        write_text(self._path, json.dumps(content, indent=1))


def address_for_reports():
    """Returns where the publisher wants reports, the project URL `Issues`, or an empty string."""
    try:
        urls = importlib.metadata.metadata("ms_lossscale").get_all("Project-URL", [])
    except importlib.metadata.PackageNotFoundError:
        return ""
    named = dict(url.split(", ", 1) for url in urls)
    return named.get("Issues", "")
