"""What the benchmarks share. Imported before MindSpore, it finds the examples' modules, and has fast convolutions."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

# The approximate seconds of a side's round.
ROUND = 0.3


def measured_by(script, *arguments, **variables):
    """Runs a script with environment variables. Returns its last line, parsed as JSON, and all of its output."""
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1]), result.stdout + result.stderr


def on_cpu(mode="graph"):
    """Sets the mode and the device."""
    import mindspore

    mindspore.set_context(mode={"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}[mode])
    mindspore.set_device("CPU")
    # A loop over 500 layers exceeds MindSpore's default limit.
    mindspore.set_recursion_limit(10_000)


def seconds_of(step, count=1):
    """Returns the mean seconds of so many steps; a step returns a tensor to wait for."""
    start = time.perf_counter()
    for _ in range(count):
        output = step()
    # Until here, PyNative mode may only have queued the work.
    output.asnumpy()
    return (time.perf_counter() - start) / count


def peak_memory():
    """Returns this process's peak memory in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def take_turns(sides, rounds, first=0):
    """
    Returns the seconds of each side's first call, and of a step in each round, in which the sides take turns. `sides`
    has for each name a function that makes its step, `first` is the number of the side to make first.
    """
    import mindspore

    steps, first_call = {}, {}
    # The side built first stays up to a third faster, and its first call includes work that the others find done.
    names = list(sides)[first:] + list(sides)[:first]
    for name in names:
        mindspore.set_seed(0)
        steps[name] = sides[name]()
        first_call[name] = seconds_of(steps[name])
    for step in steps.values():
        seconds_of(step, 3)
    count = max(1, round(ROUND / max(seconds_of(step, 3) for step in steps.values())))
    seconds = {name: [] for name in sides}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(seconds_of(steps[name], count))
    return {"first_call": first_call, "steps_in_a_round": count, "seconds": seconds}
