"""`python -m ms_lossscale.selfcheck`, see `command_line.py`."""

import os
import signal
import sys

from ms_lossscale.selfcheck.command_line import main

# The process that runs the checks imports this, too.
if __name__ == "__main__":
    # As Ctrl-C: of ranks, msrun ends the others when one fails.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # MindSpore's warnings would stand within the rows of the table. Its errors are still printed.
    os.environ.setdefault("GLOG_v", "3")
    sys.exit(main())
