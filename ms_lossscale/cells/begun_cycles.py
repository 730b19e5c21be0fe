"""Cycles that were begun with another number of calls than those of the cell that is to end them."""

from mindspore import Tensor

from ms_lossscale._mindspore import write_in_place
from ms_lossscale.step.accumulation import other_steps

# What the names end in, also those of a cell that has cycles where this one has none.
_COUNT = "accumulation.micro_steps"


class BegunCycles:
    """
    Refuses to go on within a cycle that was begun with another `gradient_accumulation_steps`: the next update would be
    off by the ratio of the two.

    Args:
        owner (str): The training cell's name.
        steps (int): Calls in a full cycle of this cell.
        counts (list[CycleCount]): Of its cycles.
    """

    def __init__(self, owner, steps, counts):
        self._owner = owner
        self._steps = steps
        self._counts = [count.value for count in counts]
        self._aliases = None
        self._addresses = None if counts else []

    def may_have_been_loaded(self):
        """
        Before each call: whether MindSpore's own functions may have loaded values since the last one, which gives a
        Parameter other memory. Only then the host reads them. Costs 0.2 us for each cycle.
        """
        if self._addresses is not None and self._addresses == list(map(Tensor.data_ptr, self._counts)):
            return False
        for count in self._counts:
            self._check(count, "what was loaded")
        # MindSpore 2.7 gives a tensor its memory when it is first used.
        write_in_place([(count, count) for count in self._counts])
        # Other tensors of the same memory, which keep it, so that nothing else gets its address.
        self._aliases = list(map(Tensor, self._counts))
        self._addresses = list(map(Tensor.data_ptr, self._counts))
        return True

    def check(self, own, parameters):
        """Before `parameters` are written into those of `own` that have the same names."""
        names = {count.name for count in self._counts}
        for name, value in parameters.items():
            if name in names or (name not in own and name.endswith(_COUNT) and value.shape == ()):
                self._check(value, "'parameters'", " Nothing was loaded.")

    def _check(self, count, what, end=""):
        its_steps = other_steps(int(count.asnumpy()), self._steps)
        if its_steps is not None:
            raise ValueError(
                f"For '{self._owner}', the argument 'gradient_accumulation_steps' must be {its_steps}, but got "
                f"{self._steps}: {what} was saved within an accumulation cycle that was begun with {its_steps}, and "
                f"holds gradients divided by that. Go on with it to the end of the cycle, or to a flush(), and save "
                f"then: between two cycles a checkpoint loads with any number.{end}"
            )
