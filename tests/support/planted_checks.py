"""The self-check's command with other checks: some hold, and after the others it must have told what it found."""

import atexit
import ctypes
import os
import sys
import time

from ms_lossscale.selfcheck.__main__ import run_command
from ms_lossscale.selfcheck.claim import CHECKS, check, expect

CHECKS.clear()


@check("has_register")
def one_is_for_others(device):
    """It is not for this device."""


@check()
def one_fails(device):
    """It fails."""
    expect(False, "nothing came")


@check()
def one_raises(device):
    """It raises."""
    raise KeyError("broken")


@check(quick=True)
def one_holds(device):
    """It holds."""


@check()
def two_crashes(device):
    """It crashes."""
    ctypes.string_at(0)


@check()
def two_exits(device):
    """It ends its process, as if all were well."""
    os._exit(0)


@check()
def two_ends_before_a_crash(device):
    """It crashes after the last check."""
    atexit.register(ctypes.string_at, 0)


@check()
def two_hangs(device):
    """It hangs where Python can't interrupt it, and lets no other thread run."""
    ctypes.PyDLL(None).sleep(1000)


@check()
def two_sleeps(device):
    """It waits for what never comes."""
    time.sleep(1000)


@check()
def three_holds(device):
    """It holds, too."""


if __name__ == "__main__":
    sys.exit(run_command(__file__))
