"""
What the stages of a step have in common, and those that do nothing: each shows what its kind is asked. What users ask
for is derived from them, in files of its own.
"""

from collections.abc import Sequence
from typing import Any

from mindspore import Parameter, nn

from ms_lossscale._memory_in_use import MemoryInUse


class Stage(nn.Cell):
    """A Cell with an attribute for each annotation of its class, passed by name; of a list it makes a CellList."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(auto_prefix=False)
        declared = self.declared()
        if parts.keys() != set(declared):
            raise TypeError(f"'{type(self).__name__}' is made of {declared}, but got {list(parts)}.")
        for name in declared:
            part = parts[name]
            setattr(self, name, nn.CellList(part, auto_prefix=False) if isinstance(part, list) else part)

    @classmethod
    def declared(cls) -> list[str]:
        """The names of what it is made of. In one order, since that of the Parameters follows it, on all ranks."""
        classes = (each for each in cls.__mro__[::-1] if issubclass(each, Stage))
        return [name for each in classes for name in vars(each).get("__annotations__", ())]


class ForwardState(nn.Cell):
    """The forward writes nothing, or nothing is ever undone."""

    names: Sequence[str] = ()
    written: Sequence[Parameter] = ()
    copies: Sequence[Parameter] = ()
    memory = MemoryInUse(())

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def of_one_call(self):
        """The same for a call by itself, which is undone whatever becomes of its cycle."""
        return self

    def save(self, inputs):
        """Copies the state before the forward, which `inputs` are tied to. Returns the inputs and the copies."""
        return inputs, ()

    def overflowed(self, saved):
        """Whether the forward left something not finite that was finite: a tuple of one bool tensor, or empty."""
        return ()

    def restore_call(self, saved):
        """Undoes the call."""

    def restore_step(self, saved):
        """Undoes the step."""


class Clipping(nn.Cell):
    """How the gradients of all networks of a step are clipped: nothing is clipped or measured."""

    # Whether `measure` finds an overflow of any network; and as for :class:`Clip`.
    finds_overflow = unscales = False

    def __init__(self, networks: int) -> None:
        super().__init__(auto_prefix=False)
        self._networks = networks

    def measure(self, grads, divisor):
        """For each network that has a norm whether its gradients are finite, as a tuple."""
        return ()

    def construct(self, grads):
        return grads

    def measures(self):
        """For each network what measures its global norm, or None."""
        return [None] * self._networks

    def norms(self):
        """Reads for each network its global norm at the last check; None where nothing measures it."""
        return [measure and measure.value_of(*measure.parts()) for measure in self.measures()]


class Alone(nn.Cell):
    """One process: gradients, overflows and numbers are its own."""

    exchanges = False

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def agree(self, overflow):
        """Whether any rank says so."""
        return overflow

    def sum(self, number):
        """The sum of a number over the ranks."""
        return number

    def own(self, weights):
        """For each weight whether every rank has a part of its own of it, whose gradient is not reduced."""
        return (False,) * len(weights)
