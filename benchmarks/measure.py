"""
Measures one case in this process, and prints the result as JSON. It is started by `bench.py`.

    python benchmarks/measure.py CASE MODE [--rounds N] [--first N] [--brief] [--memory SIDE]
"""

import argparse
import json
import resource
import time

import before_mindspore  # noqa: F401
import mindspore
from sides import CASES, ONLY_IN_GRAPH_MODE, in_brief

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}
# The approximate seconds of a side's round.
ROUND = 0.3


def _seconds(step, count):
    start = time.perf_counter()
    for _ in range(count):
        output = step()
    # Until here, PyNative mode may only have queued the work.
    output.asnumpy()
    return (time.perf_counter() - start) / count


def measure(sides, rounds, first):
    """Returns the seconds of each side's first call, and of a step in each round, in which the sides take turns."""
    steps, first_call = {}, {}
    # The side built first stays up to a third faster, and its first call includes work that the others find done.
    names = list(sides)[first:] + list(sides)[:first]
    for name in names:
        mindspore.set_seed(0)
        steps[name] = sides[name]()
        first_call[name] = _seconds(steps[name], 1)
    for step in steps.values():
        _seconds(step, 3)
    slowest = max(_seconds(step, 3) for step in steps.values())
    count = max(1, round(ROUND / slowest))
    seconds = {name: [] for name in sides}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(_seconds(steps[name], count))
    return {"first_call": first_call, "steps_in_a_round": count, "seconds": seconds}


def measure_memory(make):
    """Returns this process's peak memory in bytes, before and after ten steps."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = make()
    _seconds(step, 10)
    return {"before": 1024 * before, "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def main():
    parser = argparse.ArgumentParser(description="Measure one case of the benchmarks and print it as JSON.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the side to build first")
    parser.add_argument("--brief", action="store_true", help="only the most important sides")
    parser.add_argument("--memory", metavar="SIDE", help="measure this side's peak memory instead of times")
    args = parser.parse_args()
    mindspore.set_context(mode=MODES[args.mode])
    mindspore.set_device("CPU")
    # A loop over 500 layers exceeds MindSpore's default limit.
    mindspore.set_recursion_limit(10_000)
    sides = {
        name: side for name, side in CASES[args.case].items() if args.mode == "graph" or name != ONLY_IN_GRAPH_MODE
    }
    if args.brief:
        sides = {name: sides[name] for name in in_brief(sides)}
    print(json.dumps(measure_memory(sides[args.memory]) if args.memory else measure(sides, args.rounds, args.first)))


if __name__ == "__main__":
    main()
