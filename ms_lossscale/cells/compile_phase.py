"""Calls of a compiled cell without MindSpore's walk over all cells below it."""

from typing import Optional

from mindspore import nn


class CompilePhase(nn.Cell):
    """
    In each call in graph mode MindSpore, from 2.8 on, writes the name of the compiled graph into each cell below the
    called one, once for each way that leads to it: 4 us a cell, with hundreds of layers as long as a small step. They
    need it when a graph is compiled. This cell hands a name on once, until there is another.
    """

    if hasattr(nn.Cell, "compile_phase"):

        @property
        def compile_phase(self) -> Optional[str]:
            return nn.Cell.compile_phase.fget(self)

        @compile_phase.setter
        def compile_phase(self, value: Optional[str]) -> None:
            if value != self.compile_phase or value not in self.compile_cache:
                nn.Cell.compile_phase.fset(self, value)
