"""
Runs checks of broken packages: `python run_checks.py FILE`. The JSON file lists the folder of each, the names of the
checks, and whether an NPU is emulated. Prints a JSON line of results for each.

MindSpore is imported once. Each package is then imported in a forked process of its own.
"""

import json
import os
import sys

import mindspore  # noqa: F401


def results_of(folder, names, emulated):
    sys.path.insert(0, folder)
    import ms_lossscale

    assert ms_lossscale.__file__.startswith(folder)
    from ms_lossscale.selfcheck.checks import CHECKS
    from ms_lossscale.selfcheck.device import Device, start
    from ms_lossscale.selfcheck.worker import result

    device = Device(start("CPU", emulated), "graph", emulated)
    return [result(check, device) for check in CHECKS if check.name in names]


def main(path):
    with open(path, encoding="utf-8") as file:
        broken = json.load(file)
    for folder, names, emulated in broken:
        child = os.fork()
        if child == 0:
            print(json.dumps(results_of(folder, names, emulated)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            sys.exit(f"{folder}: the process of its checks ended with status {status}")


if __name__ == "__main__":
    main(sys.argv[1])
