"""Runs the self-check in a process, and where a check ends that, goes on with the next check in a new one."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

from ms_lossscale.selfcheck.report import end_check

# The exit status after Ctrl-C.
INTERRUPTED = 130


def run_in_processes(command, timeout):
    """Runs the command until all checks ran. Each takes at most `timeout` seconds. Returns its last exit status."""
    with tempfile.TemporaryDirectory() as folder:
        state = os.path.join(folder, "state.json")
        while True:
            status = _status_of([*command, "--state", state])
            if status in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
                return INTERRUPTED
            # The file was written when the check began.
            seconds = time.time() - os.path.getmtime(state) if os.path.exists(state) else 0
            is_late = status > 0 and seconds >= timeout
            if not end_check(state, seconds, f"it did not end in {timeout:g} s" if is_late else _why(status, seconds)):
                break
    if status >= 0:
        return status
    # While it started, or after its last check.
    print(f"\nms_lossscale.selfcheck: error: outside of any check, {_why(status, seconds)}", file=sys.stderr)
    return 1


def _status_of(command):
    """Runs a process, which a signal to this one ends, too. Returns its exit status."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while process.poll() is None:
            # The process got the Ctrl-C itself, shows what it has found, and ends.
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
    return process.returncode


def _why(status, seconds):
    how = f"exit status {status}" if status >= 0 else f"{signal.Signals(-status).name}, {signal.strsignal(-status)},"
    return f"its process ended with {how} after {seconds:.1f} s"
