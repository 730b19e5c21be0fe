"""The self-check's command with other checks. Some hold, and the command must survive the others."""

import ctypes
import os
import sys
import time

from ms_lossscale.selfcheck.claim import CHECKS, check, expect
from ms_lossscale.selfcheck.command_line import main

# The process that runs the checks imports this file, too.
CHECKS.clear()


@check(quick=True)
def one_holds(device):
    """It holds."""


@check()
def one_fails(device):
    """It fails."""
    expect(False, "nothing came")


@check()
def one_raises(device):
    """It raises."""
    raise KeyError("broken")


@check()
def one_crashes(device):
    """It crashes."""
    ctypes.string_at(0)


@check()
def one_exits(device):
    """It exits."""
    os._exit(3)


@check()
def one_hangs(device):
    """It hangs where Python can't interrupt it, and lets no other thread run."""
    ctypes.PyDLL(None).sleep(1000)


@check()
def one_waits(device):
    """It waits as MindSpore does for a device, while other threads run."""
    time.sleep(1000)


@check("has_register")
def one_is_for_others(device):
    """It is not for this device."""


@check()
def the_last_holds(device):
    """It holds, too."""


if __name__ == "__main__":
    sys.exit(main())
