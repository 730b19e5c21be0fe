"""How often the networks run in a call: once, or again at a lower scale as long as that can mend an overflow."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale.step.memory_in_use import PutMemoryBack
from ms_lossscale.step.nested import of_each_tensor, tensors_in, with_tensors
from ms_lossscale.step.of_network import any_of, of_any_network


class Try(nn.Cell):
    """
    Runs the networks once.

    Args:
        overflow_detector (OverflowDetector): Clears an NPU's register before the forward.
        forwards_and_backwards (ForwardsAndBackwards): The networks.
        memory (MemoryInUse): Of what the forward may write.

    Inputs:
        - **scale** (Tensor) - The loss scale.
        - **inputs** (tuple) - The inputs of the networks.
        - **saved** (tuple[Tensor]) - What the forward writes, as it was before.

    Outputs:
        Tuple of four: the tuples of losses and of aux; what is to be made of them, a tuple; the scale that was used.
    """

    def __init__(self, overflow_detector, forwards_and_backwards, memory):
        super().__init__(auto_prefix=False)
        self.put_memory_back = PutMemoryBack(memory)
        self.overflow_detector = overflow_detector
        self.forwards_and_backwards = forwards_and_backwards

    def construct(self, scale, inputs, saved):
        inputs = self.overflow_detector.start(inputs)
        losses, auxes, grads = self.put_memory_back(self.forwards_and_backwards(scale, inputs))
        return losses, auxes, (grads, scale), scale


class Judge(nn.Cell):
    """
    Whether a try overflowed, and whether the next one may not.

    Args:
        forward_state (Cell): Knows what the forward wrote.
        unscale (Cell): Divides the gradients.
        complete (Cell): Reduces and transforms the gradients, where each call is a step.
        found_overflow (FoundOverflow): Whether these gradients overflowed.
        ranks (Union[Alone, Ranks]): Who tries again together.
        scaling (Cell): Knows whether the scale can be lowered.
        window_state (WindowState): None where each call is a step.
        unscaled_losses (tuple[int]): Which losses no scale takes part in, so that a lower one can't make them finite.
    """

    def __init__(self, forward_state, unscale, complete, found_overflow, ranks, scaling, window_state, unscaled_losses):
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.complete = complete
        self.found_overflow = found_overflow
        self.ranks = ranks
        self.scaling = scaling
        self.window_state = window_state
        self._unscaled_losses = unscaled_losses

    def construct(self, losses, grads, scale, saved):
        others = self.forward_state.overflowed(saved)
        grads, divisor = self.unscale(grads, scale)
        grads = self.complete(grads)
        overflow = self.found_overflow(grads, divisor, others, ())[0]
        can_mend = self.scaling.can_mend(scale, overflow)
        hopeless = any_of(ops.logical_not(can_mend), others)
        for i in self._unscaled_losses:
            hopeless = ops.logical_or(hopeless, ops.logical_not(gradients.finite((losses[i],))))
        if self.window_state is not None:
            # A lost window.
            hopeless = ops.logical_or(hopeless, of_any_network(self.window_state.overflow))
        again = ops.logical_and(can_mend, ops.logical_not(self.ranks.agree(hopeless)))
        return grads, divisor, overflow, again


class CopyOfInputs(nn.Cell):
    """The same inputs in memory of their own, for networks that may write into what they are called with."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, inputs):
        return of_each_tensor(gradients.copy, inputs)


class Tries(nn.Cell):
    """
    Runs the networks until they do not overflow, as long as a lower scale can help.

    Between two tries what the forward wrote is taken back, and the law takes its step for an overflow. If no try
    succeeds, the law is put back to where it stood before the first: it sees one overflow, that of the first. So does
    of several laws each that is to blame.

    Args:
        max_retries (int): How many tries beyond the first there may be.
        one_try (Try): Runs the networks once.
        judge (Judge): Whether to try again.
        scaling (Cell): The scale and its law.
        forward_state (Cell): What the forward wrote.
        step_counters (StepCounters): Count the retries.
        keep (Cell): Copies the inputs, if the networks may write into them.

    Inputs and outputs as those of :class:`Try`.
    """

    def __init__(self, max_retries, one_try, judge, scaling, forward_state, step_counters, keep):
        super().__init__(auto_prefix=False)
        self.one_try = one_try
        self.judge = judge
        self.scaling = scaling
        self.forward_state = forward_state
        self.step_counters = step_counters
        self.keep = keep
        self.law = scaling.parameters
        self._retries = Tensor(max_retries, mstype.int32)
        self._none, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)

    def construct(self, scale, inputs, saved):
        # The networks stand here twice, and in no method that is called twice: MindSpore fails to compile that.
        law, law_scale, used = gradients.copy(self.law), scale, scale
        # Its outputs by index: of one that is unpacked and not used, graph mode warns as of a mistake.
        kept = self.keep(inputs)
        tried = self.one_try(scale, ops.depend(inputs, kept), saved)
        losses, auxes = tried[0], tried[1]
        grads, divisor, overflow, again = self.judge(losses, tried[2][0], scale, saved)
        # Flat through the loop, in which graph mode forgets the length of a tuple of equal tensors.
        first, first_overflow = (losses, auxes, grads), overflow
        tensors, left = tensors_in(first), self._retries
        while ops.logical_and(again, left > self._none):
            left = left - self._one
            taken_back = self._take_back(used, overflow, saved)
            used = ops.depend(self.scaling.read(), taken_back)
            tried = self.one_try(used, self.keep(ops.depend(kept, used)), saved)
            grads, divisor, overflow, again = self.judge(tried[0], tried[2][0], used, saved)
            tensors = tensors_in((tried[0], tried[1], grads))
            ends = ops.logical_not(ops.logical_and(again, left > self._none))
            failed = ops.logical_and(of_any_network(overflow), ends)
            gradients.assign_where(failed, self.law, law)
            law_scale = ops.select(failed, scale, used)
            overflow = ops.select(failed, first_overflow, overflow)
        losses, auxes, grads = with_tensors(first, tensors)
        return losses, auxes, (grads, divisor, law_scale, overflow), used

    def _take_back(self, scale, overflow, saved):
        self.forward_state.take_back(saved)
        self.scaling.back_off(scale, overflow)
        return self.step_counters.count_retry()
