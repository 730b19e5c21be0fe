"""
The stages of a step that do nothing. Each shows the methods of its kind; the ones that do something derive from it, in
the files beside this one.
"""

from collections.abc import Sequence
from typing import Optional

from mindspore import Parameter, nn

from ms_lossscale import _gradients as gradients
from ms_lossscale._memory_in_use import MemoryInUse
from ms_lossscale.forward_state.appearing import Appearing


class ForwardState(nn.Cell):
    """Does nothing: the forward writes nothing, or nothing is ever undone."""

    names: Sequence[str] = ()
    written: Sequence[Parameter] = ()
    copies: Sequence[Parameter] = ()
    wrote: Sequence[Parameter] = ()
    appearing: Optional[Appearing] = None

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.memory = MemoryInUse(())
        ForwardState.share_stand_ins(self, {}, "", frozenset())

    def share_stand_ins(self, stand_ins, prefix, taken):
        """
        Uses what stands for the same in other steps of the same graph: a dict from keys, to which it adds its own, with
        names that begin with `prefix`. The names `taken` are those that others have.
        """
        # Hidden from MindSpore.
        object.__setattr__(self, "_stand_ins", stand_ins)
        self._prefix, self._taken = prefix, taken

    def of_one_call(self):
        """Returns a ForwardState that saves and undoes single calls, whatever becomes of their cycle."""
        return self

    def save(self, inputs):
        """Copies the state before the forward. Returns the inputs, which now wait for that, and the copies."""
        return inputs, ()

    def overflowed(self, saved):
        """Returns whether the forward made anything finite infinite or NaN: a tuple of one bool Tensor, or none."""
        return ()

    def restore_call(self, saved):
        """Undoes the call."""

    def restore_step(self, saved):
        """Undoes the step."""

    def save_shared(self):
        """Copies what the steps of other networks write, too, before a cycle is flushed."""
        return ()

    def end_call(self, overflow, saved):
        """Ends a call of a cycle, or a flush, for what the steps of other networks write, too. Returns `overflow`."""
        return overflow


class Mean(nn.Cell):
    """Leaves gradients as they are: losses are means already, and weigh the same."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, grads, weights):
        """Returns the gradients, divided by the sum of the weights of the step."""
        return grads

    def partial(self, grads, cycle_state):
        """Returns the mean over the calls of a cycle so far, given its sum of gradients."""
        return gradients.multiply(grads, cycle_state.partial_share())


class Clipping(nn.Cell):
    """Clips and measures no gradients."""

    # Whether `measure` finds an overflow in any network.
    finds_overflow = False

    def __init__(self, networks: int) -> None:
        super().__init__(auto_prefix=False)
        self._networks = networks

    def measure(self, grads):
        """Measures the norms. Returns, for each network with a norm, whether its gradients are finite, as a tuple."""
        return ()

    def construct(self, grads):
        return grads

    def measures(self):
        """Returns for each network what measures its global norm, or None."""
        return [None] * self._networks

    def norms(self):
        """Reads the global norm of each network at the last check, None where it is not measured."""
        return [measure and measure.value_of(*measure.parts()) for measure in self.measures()]


class Conditions(nn.Cell):
    """Skips no step that did not overflow."""

    asks = False

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.conditions = nn.CellList([], auto_prefix=False)

    def construct(self, overflow, losses, grads):
        """
        Asks whether to skip a step, unless it overflowed. Returns the answer, the loss and the norm of the gradients;
        nothing if there are no conditions.
        """
        return ()


class Alone(nn.Cell):
    """Stands for a process that trains alone, and exchanges nothing."""

    exchanges = False

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def agree(self, overflow):
        """Returns whether any rank found an overflow."""
        return overflow

    def agree_on_both(self, flag, other):
        """Returns the same of two flags of shape :math:`()`."""
        return flag, other

    def sum(self, number):
        """Returns the sum of a number over the ranks."""
        return number

    def sum_like_gradients(self, number):
        """Returns the sum, or the mean, over the ranks, whichever the gradients become."""
        return number

    def are_split(self, weights):
        """Returns, for each weight, whether each rank has its own part of it, so that its gradient is not reduced."""
        return (False,) * len(weights)
