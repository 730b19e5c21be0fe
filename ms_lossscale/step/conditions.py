"""Asks the user's conditions whether to skip a step that did not overflow."""

from collections.abc import Sequence

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._gradients import any_of
from ms_lossscale.skip_condition import SkipCondition
from ms_lossscale.step.clipping import Norm
from ms_lossscale.step.own_answer import as_flag
from ms_lossscale.step.stage import Alone, Conditions


class AskedConditions(Conditions):
    """Asks the conditions of a step. `split` tells which of its weights each rank has its own part of."""

    asks = True

    def __init__(self, conditions: Sequence[SkipCondition], ranks: Alone, split: Sequence[bool]) -> None:
        super().__init__()
        self.conditions = nn.CellList([OwnCondition(each) for each in conditions], auto_prefix=False)
        self.norm = Norm(ranks, split)
        self.ranks = ranks
        # Where a ManualStep is given no loss, no condition needs one.
        self._no_loss = Tensor(0.0, mstype.float32)

    def construct(self, overflow, losses, grads):
        loss = gradients.sum_of_all(losses) if len(losses) > 0 else self._no_loss
        root, power = self.norm(grads)
        norm = root / power
        skips = gradients.never(loss)
        if not overflow:
            skips = self._ask(loss, norm)
        return self.ranks.agree(skips), loss, norm

    def _ask(self, loss, norm):
        answers = ()
        for condition in self.conditions:
            answers += (condition(loss, norm),)
        return any_of(answers)


class OwnCondition(nn.Cell):
    """Calls a condition, which may be the user's own, and checks what it returns."""

    def __init__(self, condition: SkipCondition) -> None:
        super().__init__(auto_prefix=False)
        self.condition = condition
        self._not_an_answer = (
            f"For '{type(condition).__name__}', 'construct' must return whether to skip the step, a bool Tensor of "
            f"shape (), but it returned something else. Compare Tensors, and reduce several answers with .any()."
        )

    def construct(self, loss, norm):
        return as_flag(self.condition(loss, norm), self._not_an_answer)

    def observe(self, done, loss, norm):
        """Returns `done`, a Tensor to wait for. It may observe nothing, which graph mode would drop with a warning."""
        return ops.depend(done, self.condition.observe(loss, norm))
