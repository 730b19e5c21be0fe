"""The parts that read each other's pieces of source, put together."""

from ms_lossscale.forward_writes.calls import Calls
from ms_lossscale.forward_writes.cells import Cells
from ms_lossscale.forward_writes.expressions import Expressions
from ms_lossscale.forward_writes.functions import Functions
from ms_lossscale.forward_writes.statements import Statements


class Reader:
    """
    Args:
        findings (Findings): Where what is found goes.
    """

    def __init__(self, findings):
        self.findings = findings
        self.cells = Cells(self)
        self.functions = Functions(self)
        self.statements = Statements(self)
        self.expressions = Expressions(self)
        self.calls = Calls(self)

    def read(self, cell):
        self.functions.renew_budget()
        self.cells.read(cell)
