"""Runs Python in new processes, as a user starts it: with the package, and without this process' `sys.path`. Or runs
code as a module of this process."""

import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import mindspore
import pytest

ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count()


def python_environment():  # The environment variables of a new process.
    # sys.path is not passed on, since MindSpore's O1 and O2 put folders with their own math.py on it.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths}


def run_python(*arguments, cwd, timeout=300, **variables):
    """Runs `python *arguments` in the folder `cwd`, with additional environment variables. The result has `returncode`,
    `stdout` and `stderr`."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**python_environment(), **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def check_python(*arguments, cwd, timeout=300):
    """Does `run_python`, asserts that it succeeds, and returns what was printed."""
    result = run_python(*arguments, cwd=cwd, timeout=timeout)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def import_code(folder, code):  # Runs the code as a separate module, and returns that.
    name = f"imported_code_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(name, path)
    # When it compiles, MindSpore looks up a function's module by its name.
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Job(NamedTuple):
    """The result of a job of several ranks: msrun's exit status, its output, and what each rank printed."""

    returncode: int
    output: str
    logs: list


def run_msrun(ranks, script, *arguments, cwd, timeout=200, **variables):
    """Runs `msrun script *arguments` with `ranks` ranks on this machine, in the folder `cwd`, with additional
    environment variables. Returns a Job."""
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("the ranks of a test are on CPU only, where they need no device of their own")
    environment = {**python_environment(), **variables}
    # msrun calls `python`.
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    # Ranks that start before the scheduler ask again several times, each after 1 s instead of 3 to 5 s.
    environment["MS_RETRY_INTERVAL_LOWER"] = environment["MS_RETRY_INTERVAL_UPPER"] = "1"
    # A rank waits this long for others, which may be compiling, instead of 30 s (always 30 s in MindSpore 2.7).
    environment["MS_CPU_COMM_OP_TIMEOUT"] = "120"
    options = [f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={_free_port()}"]
    options += ["--log_dir=msrun", "--join=True"]
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run", *options, script, *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(list(map(str, command)), cwd=cwd, env=environment, **options) as process:
        # Ranks inherit it. Without it, those of MindSpore 2.7 may wait for their scheduler for ever: where a thread
        # that they begin comes before the one that began it, a connection is lost.
        os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise
    logs = [(Path(cwd) / "msrun" / f"worker_{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    # Now and then MindSpore's scheduler misses that a rank has ended, and fails 30 s later, though all returned 0.
    only_the_scheduler_failed = "Scheduler process" in output and "Worker process" not in output
    return Job(0 if only_the_scheduler_failed else process.returncode, output, logs)


def check_msrun(ranks, script, *arguments, **options):  # Does `run_msrun`, and asserts that it succeeds.
    job = run_msrun(ranks, script, *arguments, **options)
    assert job.returncode == 0, "\n".join([job.output[-1000:], *(log[-3000:] for log in job.logs)])
    return job


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _stop(process):
    # On SIGINT, msrun also ends its ranks, which are in sessions of their own.
    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def is_older_mindspore():  # Whether this is MindSpore before 2.10.
    return tuple(map(int, mindspore.__version__.split(".")[:2])) < (2, 10)


def skip_with_older_mindspore(reason="a long job of several processes, run with MindSpore 2.10 only"):
    """Skips, before MindSpore 2.10, a test that takes most of a minute or shows nothing there."""
    if is_older_mindspore():
        pytest.skip(reason)
