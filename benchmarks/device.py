"""
Tries ms_lossscale on this machine's device: the self-check in both modes, the quick tests, and the benchmark. Each
shows its progress and has a time limit of its own; whatever fails or is stopped, the others still run.

    python benchmarks/device.py [--device GPU] [--short]

Writes a report for people, report.md, which is ready to be pasted into an issue of this project, and beside it what
each part printed and wrote. Exit status: 0 if all held, 1 if not.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Lines of a part's output that the report shows if the part itself says nothing, and the longest message.
LAST_LINES, LONGEST = 15, 500


class Part(NamedTuple):
    """A part: a command, its share of the time, and what the report says of the files that it leaves."""

    name: str
    command: list
    share: float
    told: callable


class Result(NamedTuple):
    """How a part ended."""

    part: Part
    status: int
    seconds: float
    stopped: bool
    output: str


def parts(args, folder):
    """Returns the parts, whose output goes to a folder."""
    device = ["--device", args.device or chosen_device()]
    selfcheck = [sys.executable, "-m", "ms_lossscale.selfcheck", *device, "--json", str(folder / "selfcheck.json")]
    tests = [sys.executable, "-m", "pytest", *device, "-rs", f"--junitxml={folder / 'tests.xml'}"]
    tests += ["--numprocesses", str(args.processes), "-m", "not slow and not nightly"]
    bench = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), *device]
    bench += ["--output", str(folder), "--processes", "1"]
    if args.torch:
        bench += ["--torch", args.torch]
    if args.short:
        selfcheck += ["--quick", "--mode", "graph"]
        tests += ["tests/device/test_numbers.py"]
        bench += ["--cases", "tiny", "--rounds", "1"]
    return [
        Part("self-check", selfcheck, 0.2, told_by_selfcheck),
        Part("tests", tests, 0.4, told_by_tests),
        Part("benchmark", bench, 0.4, told_by_benchmark),
    ]


def chosen_device():
    """Returns the name of the device that MindSpore chooses."""
    code = "import mindspore; print('device:', mindspore.get_context('device_target'))"
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    return printed.rpartition("device: ")[2].strip()


def run(part, seconds, folder):
    """Runs a part. What it prints is shown and kept. After so many seconds it is stopped."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    print(f"\n== {part.name}, at most {seconds:.0f} s\n{' '.join(part.command)}", flush=True)
    begin, lines = time.monotonic(), []
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(part.command, **options, start_new_session=True) as process:
        reader = threading.Thread(target=show, args=(process.stdout, lines), daemon=True)
        reader.start()
        stopped = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            stop(process)
        reader.join(5)
    output = b"".join(lines).decode(errors="replace")
    (folder / f"{part.name}.txt").write_text(output)
    return Result(part, process.returncode, time.monotonic() - begin, stopped, output)


def show(stream, lines):
    for line in iter(lambda: stream.read1(4096), b""):
        lines.append(line)
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def stop(process):
    """Ends a process and its children, which on Ctrl-C tell what they have found."""
    for number, seconds in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    # Children of a process that ended by itself.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def told_by_selfcheck(folder):
    written = json.loads((folder / "selfcheck.json").read_text())
    checks = written["checks"]
    failed = [check for check in checks if not check["held"]]
    lines = [f"{len(checks) - len(failed)} of {len(checks)} checks that ran held."]
    lines += [f"- `{check['name']}`: {check['claim']} **{brief(check['message'])}**" for check in failed]
    return lines


def told_by_tests(folder):
    cases = list(xml.etree.ElementTree.parse(folder / "tests.xml").iter("testcase"))
    ends = {kind: [(case, case.find(kind)) for case in cases] for kind in ("failure", "error", "skipped")}
    found = {kind: [(case, end) for case, end in pairs if end is not None] for kind, pairs in ends.items()}
    failed, skipped = found["failure"] + found["error"], found["skipped"]
    lines = [f"{len(cases) - len(failed) - len(skipped)} passed, {len(failed)} failed, {len(skipped)} skipped."]
    lines += [f"- `{case.get('classname')}.{case.get('name')}`: {brief(end.get('message'))}" for case, end in failed]
    reasons = [end.get("message") or "" for _, end in skipped]
    lines += [f"- skipped {reasons.count(reason)} times: {brief(reason)}" for reason in dict.fromkeys(reasons)]
    return lines


def told_by_benchmark(folder):
    return (folder / "bench.md").read_text().splitlines()


def brief(message):
    return " ".join((message or "").split())[:LONGEST]


def machine(folder):
    """Returns what is known of the machine: versions as the self-check wrote them, and the device's own tool."""
    lines = []
    with contextlib.suppress(OSError, ValueError):
        written = json.loads((folder / "selfcheck.json").read_text())
        lines += [f"- device: {written['device']}, {os.cpu_count()} CPU cores"]
        lines += [f"- {name} {version}" for name, version in written["versions"].items()]
        lines += [f"- {name}={value}" for name, value in written["environment"].items()]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    for command in (query, ["npu-smi", "info"]):
        if shutil.which(command[0]):
            result = subprocess.run(command, capture_output=True, text=True, timeout=30)
            lines += [f"- {command[0]}: {line}" for line in result.stdout.splitlines()]
    return lines


def report(results, folder):
    """Returns the report."""
    lines = ["# ms_lossscale on this device", "", *machine(folder)]
    for result in results:
        how = "stopped at its time limit" if result.stopped else f"exit status {result.status}"
        lines += ["", f"## {result.part.name}: {how}, {result.seconds:.0f} s", ""]
        try:
            lines += result.part.told(folder)
        except (OSError, ValueError, xml.etree.ElementTree.ParseError):
            lines += ["It left no result. The end of what it printed:", "```"]
            lines += [*result.output.splitlines()[-LAST_LINES:], "```"]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Try ms_lossscale on this machine's device, and write a report.")
    add = parser.add_argument
    add("--device", choices=("CPU", "GPU", "Ascend"), help="default: what MindSpore chooses")
    add("--output", metavar="DIR", type=Path, default="output/device", help="folder for results (default: %(default)s)")
    add("--minutes", type=float, default=10, help="for all of it (default: %(default)g)")
    add(
        "--processes",
        type=int,
        default=max(1, (os.cpu_count() or 2) * 3 // 4),
        help="of the tests (default: %(default)s)",
    )
    add("--torch", metavar="PYTHON", help="a Python that has PyTorch with CUDA, to measure its GradScaler, too")
    add("--short", action="store_true", help="only a few checks, tests and cases, to see that this program works")
    args = parser.parse_args()
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("selfcheck.json", "tests.xml", "bench.md", "bench.json"):
        (folder / name).unlink(missing_ok=True)
    results = []
    for part in parts(args, folder):
        results.append(run(part, 60 * args.minutes * part.share, folder))
        # What was found so far is kept, whatever ends this program.
        (folder / "report.md").write_text(report(results, folder))
    print(f"\n{report(results, folder)}\nThis is in {folder / 'report.md'}.")
    return 0 if all(result.status == 0 and not result.stopped for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
