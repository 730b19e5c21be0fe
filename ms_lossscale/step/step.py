"""One training step as a transaction: either all of it happens, or only the loss scale and the counters change."""

from collections.abc import Sequence
from typing import Callable, Optional, Union

from mindspore import nn, ops

from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale._mindspore import Compiled
from ms_lossscale.step.cause import Cause
from ms_lossscale.step.cycle_state import CycleState
from ms_lossscale.step.forward_backward import ForwardsAndBackwards
from ms_lossscale.step.found_overflow import FoundOverflow
from ms_lossscale.step.scaling import Scaling, Unscale
from ms_lossscale.step.stage import Alone, Clipping, Conditions, ForwardState, Mean
from ms_lossscale.step.update import Undo, Update


class Step(nn.Cell):
    """
    Runs the stages of a step in order: 1 and 2 in `begin`, 3 in ForwardsAndBackwards, 4 to 9 in `end`, which PyNative
    mode compiles. `end` is an End if each call is a step, and an EndOfCall of `cycle.py` if several are accumulated.

    1. Read the scale once. 2. Copy what the forward will write. 3. Clear an NPU's register; forward and backward.
    4. Unscale. 5. Accumulate; all calls but the last of a cycle end here. 6. Reduce across ranks, and transform. 7. One
    overflow check, and conditions. 8. One update of the scale. 9. One branch: update, or undo.

    `build.py` chooses stages that do nothing where a training cell does not need one. One network is the case N = 1 of
    several.

    Inputs:
        - **\\*inputs** - The inputs of the networks.

    Outputs:
        Tuple of four: the tuples of losses and of aux, whether the step was skipped, and the scale that was used, of
        shape :math:`()`, or of shape :math:`(N,)` if each network has its own. Index the result rather than unpack it:
        graph mode warns about unused names.
    """

    def __init__(
        self,
        scaling: Scaling,
        forward_state: ForwardState,
        forwards_and_backwards: ForwardsAndBackwards,
        end: Union[nn.Cell, Compiled],
        cause: Cause,
        update: Update,
        cycle_state: Optional[CycleState],
        flush_cycle: Union[nn.Cell, Compiled, None],
        make_trial: Callable[[], nn.Cell],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.scaling = scaling
        self.forward_state = forward_state
        self.forwards_and_backwards = forwards_and_backwards
        self.end = end
        self.cause = cause
        self.update = update
        self.cycle_state = cycle_state
        self.flush_cycle = flush_cycle
        self.make_trial = make_trial

    def begin(self, inputs):
        """Begins a step. Returns its scale, the inputs, which wait for what is copied, and the copies."""
        scale = self.scaling.read()  # 1. Read the scale once.
        inputs, saved = self.forward_state.save(inputs)  # 2. Copy what the forward will write.
        return scale, inputs, saved

    def construct(self, *inputs):
        scale, inputs, saved = self.begin(inputs)
        # 3. Forward and backward, once each.
        losses, auxes, grads, weights = self.forwards_and_backwards(scale, inputs)
        overflow = self.end(grads, losses, weights, scale, saved)
        return losses, auxes, overflow, scale

    def overflowed_loss_scales(self, overflowed):
        """Returns which scales' gradients overflowed, given the names of the weights; without names, all did."""
        if len(self.scaling.loss_scales) == 1 or not overflowed:
            return [True] * len(self.scaling.loss_scales)
        weights = (optimizer.parameters for optimizer in self.update.optimizers.optimizers)
        return [any(weight.name in overflowed for weight in its) for its in weights]

    def has_begun(self):
        """Returns whether an accumulation cycle has begun."""
        return self.cycle_state is not None and self.cycle_state.count.has_begun()

    def flush(self):
        """Ends a cycle that has begun. Returns whether it overflowed, a bool Tensor, or None if none has begun."""
        return self.flush_cycle() if self.has_begun() else None


class End(nn.Cell):
    """
    Ends a step that is one call: 4 to 9. Returns what :class:`Decision` returns.

    Inputs:
        - **grads** (tuple[Tensor]) - The scaled gradients.
        - **losses** (tuple[Tensor]) - The losses.
        - **weights** (tuple[Tensor]) - The weight of each network's loss, see :class:`WeightedMean`, or none.
        - **scale** (Tensor) - The loss scale of the step.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.
    """

    def __init__(
        self,
        forward_state: ForwardState,
        unscale: Unscale,
        mean: Mean,
        check: "Check",
        decision: "Decision",
    ) -> None:
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.mean = mean
        self.check = check
        self.decision = decision

    def construct(self, grads, losses, weights, scale, saved):
        of_state = self.forward_state.overflowed(saved)  # 3. An overflow may show only in what the forward wrote.
        grads = self.mean(self.unscale(grads, scale), weights)  # 4. Unscale in float32.
        return self.decision(*self.check(grads, of_state, ()), losses, (losses, of_state, ()), scale, saved)


class Check(nn.Cell):
    """
    Checks the gradients of a call, of an accumulation cycle, or of a cycle that is flushed. `before_check` are the
    stages that change them before.

    Inputs:
        - **grads** (tuple[Tensor]) - The unscaled gradients.
        - **of_state** (tuple[Tensor]) - Whether what the forward wrote overflowed, bools of shape :math:`()`.
        - **earlier** (tuple[Tensor]) - Overflows that were found earlier in the step, in the form of the answer.

    Outputs:
        Tuple of three: the gradients that the optimizers are to get, before clipping; whether the step overflowed, bool
        of shape :math:`()`, or of shape :math:`(N,)` if each network has its own loss scale; and a tuple with the flags
        of :class:`Packing`, empty if they were not computed.
    """

    def __init__(
        self, before_check: Sequence[nn.Cell], clipping: Clipping, found_overflow: FoundOverflow, ranks: Alone
    ) -> None:
        super().__init__(auto_prefix=False)
        self.before_check = nn.CellList(list(before_check), auto_prefix=False)
        self.clipping = clipping
        self.found_overflow = found_overflow
        self.ranks = ranks

    def construct(self, grads, of_state, earlier):
        for stage in self.before_check:  # 6. Reduce the gradients across ranks, and transform them.
            grads = stage(grads)
        norms_finite = self.clipping.measure(grads)
        found, flags = self.found_overflow(grads, norms_finite, of_state)  # 7. One overflow check.
        return grads, self.ranks.agree(any_of((found,) + earlier)), flags


class Decision(nn.Cell):
    """
    Ends a step that has been checked, which is a call, an accumulation cycle or a cycle that is flushed: updates or
    undoes. Without `may_skip`, nothing is ever skipped.

    Inputs:
        - **grads**, **overflow**, **flags** - The outputs of :class:`Check`.
        - **losses** (tuple[Tensor]) - The losses that conditions look at.
        - **origin** (tuple) - Where an overflow may have come from: the losses and `of_state` of the call, and, within
          a cycle, a tuple of whether its last call itself overflowed and of what :class:`CycleCause` says of it.
        - **scale** (Tensor) - The loss scale of the step.
        - **saved** (tuple[Tensor]) - What the forward wrote, as it was before.

    Outputs:
        Tensor, whether the step was skipped, bool of shape :math:`()`. It is available once the branch is done.
    """

    def __init__(
        self, conditions: Conditions, cause: Cause, scaling: Scaling, update: Update, undo: Undo, may_skip: bool
    ) -> None:
        super().__init__(auto_prefix=False)
        self.conditions = conditions
        self.cause = cause
        self.scaling = scaling
        self.update = update
        self.undo = undo
        self._may_skip = may_skip

    def construct(self, grads, overflow, flags, losses, origin, scale, saved):
        skips = of_any_network(overflow)
        asked = self.conditions(skips, losses, grads)  # 7. Conditions, where nothing overflowed.
        stands_still = self.cause.stands_still(overflow, *origin) + asked[:1]
        self.scaling.adjust(scale, overflow, stands_still)  # 8. One update of the scale.
        if not self._may_skip:
            return ops.depend(skips, self.update(grads, asked))  # 9. Nothing was checked: no branch.
        skips = any_of((skips,) + asked[:1])
        done = self.undo(grads, flags, saved, origin, asked) if skips else self.update(grads, asked)  # 9. One branch.
        return ops.depend(skips, done)
