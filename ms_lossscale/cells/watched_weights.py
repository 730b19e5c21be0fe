"""Notices weights that are infinite or NaN in a training whose steps are applied all the same."""

from ms_lossscale._user_warnings import warn_user
from ms_lossscale._values import named_counts, not_finite_weights


class WatchedWeights:
    """Warns once. A step does not look at weights, since a loss and gradients may be finite in spite of them."""

    def __init__(self, owner, steps, each_decides):
        self._owner = owner
        self._steps = steps
        self._each_decides = each_decides
        self._has_warned = False
        # The last step, of each network, after which its weights were finite.
        self._finite_at = {}

    def look(self):
        """Reads the weights, and warns if there is reason to."""
        for i, step in enumerate(self._steps):
            # A training that skips is told of its weights with all else that there is to say.
            if not self._has_warned and not step.update.step_counters.as_dict()["consecutive_skipped_steps"]:
                counts = not_finite_weights(_weights_of(step))
                number = step.update.step_counters.steps_made()
                if counts:
                    self._has_warned = True
                    warn_user(self._message(i, number, counts))
                self._finite_at[i] = number

    def _message(self, i, number, counts):
        of_network = f" of network {i}" if self._each_decides else ""
        before = f"; after step {self._finite_at[i]} they were finite" if i in self._finite_at else ""
        found = (
            f"For '{self._owner}', weights{of_network} are infinite or NaN, after step {number} at the latest{before}: "
            f"{named_counts(counts)}. Steps are applied all the same, since"
        )
        if not any(its.drop_overflow_update for its in self._steps[i].scaling.loss_scales):
            return (
                f"{found} nothing is checked: no loss scale was passed, or one with drop_overflow_update=False. Go on "
                f"from a checkpoint in which the weights are finite, and pass DynamicLossScale(), or 1 as the loss "
                f"scale, which checks and does not scale."
            )
        return (
            f"{found} the loss and the gradients are finite. Go on from a checkpoint in which the weights are finite. "
            f"What to look at: the checkpoint that was loaded, and with float16 weights the optimizer's eps. An eps of "
            f"1e-8 is 0 in float16, so that a gradient of 0 becomes 0 / 0: pass eps=1e-4, say, keep the weights in "
            f"float32 (network.to_float(mindspore.float16) still computes in float16), or share the optimizer between "
            f"ranks with ShardedOptimizer, which updates float32 copies."
        )


def _weights_of(step):
    """Yields the weights: those that are trained, and those that are only read. Frozen state may be NaN on purpose."""
    trained = list(step.update.optimizers.parameters)
    yield from trained
    others = {id(its) for its in (*trained, *step.forward_state.written)}
    yield from (its for its in step.forwards_and_backwards.get_parameters() if id(its) not in others)
