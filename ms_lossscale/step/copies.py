"""Copies of many Parameters by few operators."""

from mindspore import ParameterTuple, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim

# A group of fewer makes a larger graph than its Parameters alone.
_SMALLEST_GROUP = 6


class Copies(nn.Cell):
    """
    Copies Parameters, and writes the copies back. Small ones of one shape, such as BatchNorm's statistics, are copied
    by one operator: an operator for each would cost more than the copying.

    Args:
        parameters (Sequence[Parameter]): The Parameters.
        is_judged (Sequence[bool]): For each whether it is judged: whether the forward made it infinite or NaN matters.
    """

    def __init__(self, parameters, is_judged):
        super().__init__(auto_prefix=False)
        of_shape = {}
        for parameter, judged in zip(parameters, is_judged):
            if judged and parameter.dtype == mstype.float32 and gradients.is_small(parameter.shape):
                of_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        groups = [group for group in of_shape.values() if len(group) >= _SMALLEST_GROUP]
        grouped = {id(parameter) for group in groups for parameter in group}
        alone = [i for i, parameter in enumerate(parameters) if id(parameter) not in grouped]
        # Hidden from MindSpore: they belong to the networks.
        object.__setattr__(self, "groups", tuple(map(ParameterTuple, groups)))
        object.__setattr__(self, "alone", ParameterTuple([parameters[i] for i in alone]))
        # The positions of those that are judged among those that are copied alone.
        self._judged = tuple(position for position, i in enumerate(alone) if is_judged[i])
        self.has_judged = any(is_judged)

    def taken(self):
        """Returns the copies: a tuple of a Tensor for each group, and for each Parameter alone."""
        if len(self.groups) == 0:
            return gradients.copy(self.alone)
        stacks = self._stacks()
        return stacks + gradients.copy(self.alone) if len(self.alone) > 0 else stacks

    def _stacks(self):
        stacks = ()
        for group in self.groups:
            stacks = (*stacks, prim.stack(group))
        return stacks

    def _judged_of(self, tensors):
        return gradients.items(tensors, self._judged) if len(self._judged) > 0 else ()

    def restore(self, copies):
        """Writes the copies back. Returns what to wait for."""
        if len(self.groups) == 0:
            return gradients.assign(self.alone, copies)
        done = ()
        for i in range(len(self.groups)):
            done = (*done, gradients.assign(self.groups[i], ops.unstack(copies[i])))
        if len(self.alone) > 0:
            done = (*done, gradients.assign(self.alone, copies[len(self.groups) :]))
        return done

    def overflowed_since(self, copies):
        """Returns whether anything that is judged was finite when it was copied, and is no longer, bool of shape ()."""
        before = copies
        after = self.alone
        if len(self._judged) < len(self.alone):
            before = copies[: len(self.groups)] + self._judged_of(copies[len(self.groups) :])
            after = self._judged_of(self.alone)
        if len(self.groups) > 0:
            after = self._stacks() + after
        became = prim.logical_not(gradients.has_finite_sum(after))
        # Only then does it matter whether single elements are finite, and were before: sums of large ones are not, nor
        # are the bounds that an observer begins with.
        if became:
            became = gradients.became_not_finite(before, after)
        return became
