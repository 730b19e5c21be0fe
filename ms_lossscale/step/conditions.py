"""The conditions that may skip a step that did not overflow."""

import itertools

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale.step.clipping import Norm
from ms_lossscale.step.records import Asked, Gradients


class Question(nn.Cell):
    """Asks a Cell a question, to which the answer is a bool Tensor of shape (); if `takes_numbers`, also a number's."""

    def __init__(self, cell, question, takes_numbers=False):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self._takes_numbers = takes_numbers
        self._must = (
            f"For '{type(cell).__name__}', 'construct' must return {question}, a bool Tensor of shape (), but it "
            f"returned something else. Compare Tensors, and reduce several answers with .any()."
        )

    def construct(self, *inputs):
        answer = self.cell(*inputs)
        if not isinstance(answer, Tensor) or not (self._takes_numbers or answer.dtype == mstype.bool_):
            raise TypeError(self._must)
        if answer.size != 1:
            raise ValueError(self._must)
        return prim.cast(answer.reshape(()), mstype.bool_)

    def observe(self, *inputs):
        # Here, since of `asked.cell.observe(...)` in another Cell's loop graph mode drops the graph of its `construct`
        # ("The input is null") in a process that has compiled much, and then always.
        return self.cell.observe(*inputs)


class Conditions(nn.Cell):
    """Asks the conditions of a step."""

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        self._zero = Tensor(0.0, mstype.float32)
        self._ranks = plan.ranks
        self._norm = Norm(plan.ranks, tuple(itertools.chain(*plan.split)))
        asked = [Question(condition, "whether to skip the step") for condition in plan.settings.skip_conditions]
        self.conditions = nn.CellList(asked, auto_prefix=False)

    def ask(self, overflowed: Tensor, losses: tuple[Tensor, ...], grads: Gradients) -> Asked:
        """Asks them, unless the step overflowed. All ranks skip if one of them does."""
        loss = gradients.sum_of_all(losses) if len(losses) > 0 else self._zero
        root, power = self._norm(gradients.flat(grads))
        norm = prim.div(root, power)
        skips = gradients.never(norm)
        if not overflowed:
            skips = self._any_skips(loss, norm)
        if self._ranks is not None:
            (skips,) = self._ranks.agree((skips,))
        return {"loss": loss, "norm": norm, "skips": skips}

    def _any_skips(self, loss, norm):
        answers = ()
        for condition in self.conditions:
            answers = (*answers, condition(loss, norm))
        return any_of(answers)

    def stand_still(self, asked, overflows, stands_still):
        """Returns the flags of the scales that stand still, where all without an overflow do if a condition skips."""
        still = ()
        for i in range(len(overflows)):
            flag = prim.logical_and(asked["skips"], prim.logical_not(overflows[i]))
            still = (*still, flag if stands_still is None else prim.logical_or(stands_still[i], flag))
        return still

    def observe(self, asked, after):
        """Lets the conditions observe an applied step. Returns what to wait for."""
        for condition in self.conditions:
            after = ops.depend(after, condition.observe(asked["loss"], asked["norm"]))
        return after
