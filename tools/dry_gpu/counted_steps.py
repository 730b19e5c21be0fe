"""
Makes steps on the pretended GPU, and prints a line of JSON for each side of a case: what a step launches that is
applied, and one that finds an overflow. count.py runs it:

    python counted_steps.py MODE CASE SIDE ...
"""

import json
import sys
import warnings
from functools import partial

import dry_gpu

# isort: split
import base
import mindspore
import sides
from dry import cells
from dry.settings import SETTINGS, with_settings

# A cell looks at more in its first calls. 4 calls are counted, so that a cycle of accumulation ends with the last one.
CALLS_BEFORE, CALLS = 8, 4
COPIES = ("memcpyHtoD", "memcpyDtoH", "memcpyDtoD")


def counted(step):
    """Returns what a call launches, and whether it says that it was skipped."""
    # The call before may still be at work.
    mindspore.runtime.synchronize()
    dry_gpu.reset()
    output = step()
    mindspore.runtime.synchronize()
    calls = dry_gpu.calls()
    return {
        "kernels": dry_gpu.kernels(),
        "compiled": len(dry_gpu.kernels(compiled_only=True)),
        "calls": sum(calls.values()),
        "copies": {name: calls[name] for name in COPIES},
        "skipped": base.was_skipped(output),
    }


def counts(step):
    """Returns what the last of some calls launches, and what the first does, applied and with an overflow."""
    found = {}
    for name, overflows in (("applied", False), ("overflow", True)):
        dry_gpu.overflow(overflows)
        for _ in range(CALLS_BEFORE):
            step()
        calls = [counted(step) for _ in range(CALLS)]
        found[name] = calls[-1]
        found[f"{name}, first of a cycle"] = calls[0]
    dry_gpu.overflow(False)
    return found


def with_setting(name, network):
    """Returns this package's step of a network, with a setting."""
    network, keywords = with_settings(network, name)
    return sides.scaled(network, **keywords)


def begin(case, name):
    """Returns a function that makes a step."""
    if case == "cells":
        step, inputs = cells.make(name)
    else:
        make, known = sides.CASES[case]
        ours = {"plain": sides.scaled, "ManualStep": sides.functional, "loss_scale=None": sides.unscaled}
        ours.update({each: partial(with_setting, each) for each in SETTINGS})
        network, inputs = make()
        step = {**ours, **known}[name](network)
    return lambda: step(*inputs)


def main(mode, case, *names):
    # Values are whatever memory holds, and some warnings look at them.
    warnings.simplefilter("ignore")
    base.use("GPU", mode)
    for name in names:
        mindspore.set_seed(0)
        print(json.dumps(counts(begin(case, name))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
