"""What the benchmarks share. Imported before MindSpore, it finds the examples' modules, and has fast convolutions."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from common.output import markdown_table


def measured_by(script, *arguments, python=sys.executable, **variables):
    """Runs a script with environment variables. Returns its last line, parsed as JSON, and all of its output."""
    command = [python, str(script), *map(str, arguments)]
    result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, errors="replace")
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1]), result.stdout + result.stderr


def measured_in_turns(script, *arguments, sides, processes=None):
    """
    Returns what `take_turns` does from so many processes, by default as many as sides, each of which builds another
    side first.
    """
    starts = range(0, len(sides), max(1, len(sides) // (processes or len(sides))))
    return [measured_by(script, *arguments, *sides[i:], *sides[:i])[0] for i in starts[:processes]]


def use(device, mode="graph"):
    """Sets the device and the mode."""
    import mindspore

    mindspore.set_context(mode={"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}[mode])
    mindspore.set_device(device)
    # A loop over 500 layers exceeds MindSpore's default limit.
    mindspore.set_recursion_limit(10_000)


def seconds_of(step, count=1):
    """Returns the mean seconds of so many steps; a step returns a tensor to wait for, alone or first of a tuple."""
    import mindspore

    start = time.perf_counter()
    for _ in range(count):
        output = step()
    # Until here, the work may only be queued. On a GPU or NPU the update may still run when the loss is there.
    (output[0] if isinstance(output, tuple) else output).asnumpy()
    if mindspore.get_context("device_target") != "CPU":
        mindspore.runtime.synchronize()
    return (time.perf_counter() - start) / count


def peak_memory():
    """Returns the peak memory in bytes: on a GPU or NPU the device's since the last reset, on CPU this process's."""
    import mindspore

    if mindspore.get_context("device_target") == "CPU":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mindspore.runtime.max_memory_allocated()


def begin_measuring_memory():
    """Resets the device's peak memory. Returns what is in use."""
    import mindspore

    mindspore.runtime.reset_max_memory_allocated()
    return mindspore.runtime.memory_allocated()


def take_turns(sides, rounds):
    """
    Returns the seconds of each side's first call, and of a step in each round, in which the sides take turns; of each
    side the device's memory, which is 0 on CPU, and whether its last step was skipped. `sides` has for each name a
    function that makes its step; they are built in this order.
    """
    import mindspore

    # The side built first stays up to a third faster, and its first call includes work that the others find done.
    names, steps, first_call, memory = list(sides), {}, {}, {}
    for name in names:
        before = begin_measuring_memory()
        mindspore.set_seed(0)
        steps[name] = sides[name]()
        first_call[name] = seconds_of(steps[name])
        seconds_of(steps[name], 3)
        memory[name] = mindspore.runtime.max_memory_allocated() - before
    # A side's round takes about 0.3 seconds.
    count = max(1, round(0.3 / max(seconds_of(step, 3) for step in steps.values())))
    seconds = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(seconds_of(steps[name], count))
    skipped = {name: was_skipped(step()) for name, step in steps.items()}
    measured = {"first_call": first_call, "steps_in_a_round": count, "seconds": seconds}
    return {**measured, "memory": memory, "skipped": skipped}


def was_skipped(output):
    """Returns whether a step that returns a flag beside its loss was skipped: such a step has other work to do."""
    return isinstance(output, tuple) and len(output) > 1 and bool(output[1].asnumpy().any())


def table(rows, left):
    """Returns rows, dicts from columns' names to texts, as a table in GitHub's Markdown."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(header, [[str(row.get(name, "-")) for name in header] for row in rows], left)
