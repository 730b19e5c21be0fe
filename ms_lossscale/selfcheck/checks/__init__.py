"""The checks, a file for each topic, in the order in which they run."""

# isort: off
from ms_lossscale.selfcheck.checks import overflow as overflow
from ms_lossscale.selfcheck.checks import transaction as transaction
from ms_lossscale.selfcheck.checks import register as register
from ms_lossscale.selfcheck.checks import update_rules as update_rules
from ms_lossscale.selfcheck.checks import arithmetic as arithmetic
from ms_lossscale.selfcheck.checks import resume as resume
from ms_lossscale.selfcheck.checks import loops as loops
from ms_lossscale.selfcheck.checks import ranks as ranks
from ms_lossscale.selfcheck.checks import cost as cost

# isort: on
from ms_lossscale.selfcheck.claim import CHECKS as CHECKS
