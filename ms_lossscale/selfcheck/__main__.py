"""`python -m ms_lossscale.selfcheck`, see `command_line.py`."""

import signal
import sys

from ms_lossscale.selfcheck.command_line import main

# The process that runs the checks imports this, too.
if __name__ == "__main__":
    # As Ctrl-C: of ranks, msrun ends the others when one fails.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
