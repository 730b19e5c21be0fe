"""
The process that runs the checks, one after the other, so that MindSpore is imported only once.

A hang within MindSpore can be ended only with its process, and a crash also ends the process. So the process that asks
for the checks computes nothing itself. It waits for a limited time, and then starts another one.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from typing import NamedTuple

import mindspore

from ms_lossscale.overflow_detector import default_overflow_detector
from ms_lossscale.selfcheck.checks import CHECKS
from ms_lossscale.selfcheck.claim import DoesNotHold
from ms_lossscale.selfcheck.device import MODES, CouldNotRun, Device, is_rank, leave_ranks, start

_PROCESSES = multiprocessing.get_context("spawn")
# Seconds to import MindSpore, start the device and find the other ranks; and to leave them.
_LIMIT_TO_START, _LIMIT_TO_END = 300, 20


class _Stopped(Exception):
    """The worker hung or crashed, or can't run this check, so there is no result."""


class Surroundings(NamedTuple):
    """What only the worker knows: the device, its chip, the detector, what can be checked, and its rank."""

    device: str
    chip: str
    detector: str
    has: frozenset
    rank: int


class Worker:
    """
    A process that runs checks, each within a number of seconds, and is replaced if it ends. As a context manager, it
    ends with its block. The target is a device, or None for MindSpore's choice.
    """

    def __init__(self, target, emulate, limit):
        self._options, self._limit = (target, emulate), limit
        self._start()

    def _start(self):
        self._connection, others_end = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_serve, args=(others_end, *self._options))
        # A terminal sends Ctrl-C to both processes. This one handles it, and ends the other.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        others_end.close()
        try:
            self.surroundings = self._answer(_LIMIT_TO_START)
        except _Stopped as stopped:
            raise CouldNotRun(f"MindSpore did not start on the device {self._options[0] or 'CPU'}: {stopped}") from None
        except BaseException:
            self._kill()
            raise

    def result_of(self, check, mode):
        """Returns the result of a check, see :func:`result`."""
        begin = time.perf_counter()
        try:
            if not self._process.is_alive():
                # A new process can't take its place among the ranks.
                leave_ranks()
                self._start()
            if not self.surroundings.has.issuperset(check.needs):
                raise _Stopped("an earlier check ended the process of this rank, and its successor runs alone")
            return self._answer(self._limit, (check.name, mode))
        except _Stopped as stopped:
            return described(check, mode, time.perf_counter() - begin, str(stopped))

    def _answer(self, limit, question=None):
        try:
            if question is not None:
                self._connection.send(question)
            if self._connection.poll(limit):
                answer = self._connection.recv()
                if isinstance(answer, CouldNotRun):
                    raise answer
                return answer
            self._kill()
            raise _Stopped(f"it did not end within {limit:g} s")
        except (EOFError, ConnectionError):
            self._process.join(_LIMIT_TO_END)
            self._kill()
            status = self._process.exitcode
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
            raise _Stopped(f"it ended its process {how}") from None

    def _kill(self):
        self._process.kill()
        self._process.join()

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        self._connection.close()
        if error is None:
            self._process.join(_LIMIT_TO_END)
        self._kill()


def _serve(connection, target, emulate):
    """Runs in the worker: sends its surroundings, and then the result of each check that is asked for."""
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    try:
        target = start(target, emulate)
    except CouldNotRun as error:
        connection.send(error)
        return
    connection.send(_surroundings(Device(target, "graph", emulate)))
    checks = {check.name: check for check in CHECKS}
    devices = {mode: Device(target, mode, emulate) for mode in MODES}
    with contextlib.suppress(EOFError):
        while True:
            name, mode = connection.recv()
            connection.send(result(checks[name], devices[mode]))


def _end_with(parent):
    """Ends this process with its parent, however that ends."""
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _surroundings(device):
    with device.in_use():
        needs = {need for check in CHECKS for need in check.needs if getattr(device, need)}
        detector = type(default_overflow_detector()).__name__
    rank = mindspore.communication.get_rank() if is_rank() else 0
    return Surroundings(str(device), device.chip, detector, frozenset(needs), rank)


def result(check, device):
    """Runs a check in this process. Returns the result as the JSON file has it."""
    begin, message = time.perf_counter(), ""
    try:
        with device.in_use():
            check.run(device)
    except DoesNotHold as error:
        message = str(error)
    except Exception as error:
        # MindSpore appends the place in its own sources.
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        traceback.print_exc()
    return described(check, device.mode, time.perf_counter() - begin, message)


def described(check, mode, seconds, message):
    """Returns the result of a check, which holds if there is no message."""
    return {
        "name": check.name,
        "claim": check.claim,
        "mode": mode,
        "held": not message,
        "seconds": round(seconds, 3),
        "message": message,
    }
