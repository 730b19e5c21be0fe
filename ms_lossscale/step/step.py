"""One training step as a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

from mindspore import nn


class Step(nn.Cell):
    """
    The order of events: 1 to 3 in `construct`, 4 and 5 in that of AfterBackward, 6 to 9 in that of Decision, below.
    They are three since in PyNative mode a graph is compiled from 4 on, and a window that is flushed begins at 6.
    With retries, `tries.py` repeats 1 to 4 and, where each call is a step, 6 and 7.

    1. Read the scale once. 2. Copy what the forward will write. 3. Clear an NPU's register; forward and backward.
    4. Unscale. 5. Accumulate; all calls but a window's last end here. 6. Reduce across ranks, and transform. 7. One
    overflow check. 8. One update of the scale. 9. One branch: update, or undo.

    What a training cell does without is a stage that does nothing, and one network is the case N = 1 of several:
    `build.py` chooses the stages.

    Args:
        scaling, forward_state, tries, after_backward (Cell): The stages.
        one_try (Try): A run of the networks: a stage of `tries`.
        window (Cell): Which calls make a step: a stage of `after_backward`.
        flush_window (Cell): Ends a window that has begun.
        update (Update): What happens in a step that did not overflow: a stage of `window`.

    Inputs:
        - **\\*inputs** - The inputs of the networks.

    Outputs:
        Tuple of four: the tuples of losses and of aux, whether the step overflowed, and the scale that was used, of
        shape :math:`()`, or those of the networks, of shape :math:`(N,)`. Whoever does not use all of them takes them
        by index: of what is unpacked and not used, graph mode warns as of a mistake.
    """

    def __init__(
        self,
        *,
        scaling,
        forward_state,
        tries,
        one_try,
        after_backward,
        window,
        flush_window,
        update,
    ):
        super().__init__(auto_prefix=False)
        self.scaling = scaling
        self.forward_state = forward_state
        self.tries = tries
        self.overflow_detector = one_try.overflow_detector
        self.forwards_and_backwards = one_try.forwards_and_backwards
        self.after_backward = after_backward
        self.window = window
        self.flush_window = flush_window
        self.loss_scales = scaling.loss_scales
        self.optimizers = update.optimizers
        self.clipping = update.clipping
        self.moving_averages = update.moving_averages
        self.step_counters = update.step_counters

    def construct(self, *inputs):
        scale = self.scaling.read()  # 1. Read the scale once.
        inputs, saved = self.forward_state.save(inputs)  # 2. Copy what the forward will write.
        losses, auxes, made, scale = self.tries(scale, inputs, saved)  # 3. Forward and backward, once each.
        overflow = self.after_backward(*made, saved)
        return losses, auxes, overflow, scale

    def to_blame(self, overflowed):
        """For each loss scale whether it was to blame for a skipped step. Which weights overflowed is known by name."""
        if len(self.loss_scales) == 1 or not overflowed:
            return [True] * len(self.loss_scales)
        weights = (optimizer.parameters for optimizer in self.optimizers.optimizers)
        return [any(weight.name in overflowed for weight in its) for its in weights]

    def flush(self):
        """Ends a window that has begun. Returns whether it overflowed, a bool Tensor; None if none has begun."""
        return self.flush_window() if self.window.has_begun() else None


class AfterBackward(nn.Cell):
    """What follows the gradients: in PyNative mode, too, one compiled graph, hence a cell of its own."""

    def __init__(self, forward_state, unscale, window):
        super().__init__(auto_prefix=False)
        self.forward_state = forward_state
        self.unscale = unscale
        self.window = window

    def construct(self, grads, scale, saved):
        others = self.forward_state.overflowed(saved)  # 3. What the forward wrote may show what no gradient does.
        grads, divisor = self.unscale(grads, scale)  # 4. Unscale in float32.
        return self.window(grads, divisor, scale, others, (), saved)  # 5. Accumulate; at the window's end, decide.


class AfterTries(nn.Cell):
    """The same where the gradients of each try were unscaled and judged: what is left of it."""

    def __init__(self, window):
        super().__init__(auto_prefix=False)
        self.window = window

    def construct(self, grads, divisor, scale, overflow, saved):
        return self.window(grads, divisor, scale, (), (overflow,), saved)  # 5. Accumulate; at the window's end, decide.


class Decision(nn.Cell):
    """What ends a step: of a call, of a window, or of one that is flushed."""

    def __init__(self, complete, found_overflow, scaling, update_or_undo):
        super().__init__(auto_prefix=False)
        self.complete = complete
        self.found_overflow = found_overflow
        self.scaling = scaling
        self.update_or_undo = update_or_undo

    def construct(self, grads, divisor, scale, others, known, saved):
        grads = self.complete(grads)  # 6. Reduce the gradients across ranks, and transform them.
        overflow, flags = self.found_overflow(grads, divisor, others, known)  # 7. One overflow check.
        self.scaling.adjust(scale, overflow)  # 8. One update of the scale.
        return self.update_or_undo(overflow, grads, flags, saved)  # 9. One branch.
