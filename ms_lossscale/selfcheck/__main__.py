"""`python -m ms_lossscale.selfcheck`, see `command_line.py`."""

import sys

from ms_lossscale.selfcheck.command_line import main

sys.exit(main())
