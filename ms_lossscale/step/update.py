"""What an applied step does: clip, step the optimizers, and move the averages."""

from mindspore import nn, ops

from ms_lossscale._mindspore.graphs import only_if
from ms_lossscale.step.averages import MovingAverage
from ms_lossscale.step.clipping import Clip
from ms_lossscale.step.optimizers import Optimizers


class Update(nn.Cell):
    """Applies the prepared gradients of a step."""

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        settings = plan.settings
        self.optimizers = Optimizers(plan.optimizers)
        self.after_update = settings.after_update
        clips = [Clip(plan, i) for i in range(len(plan.optimizers))]
        self.clips = nn.CellList(clips, auto_prefix=False)
        self._clips_any = any(bound is not None for bound in (*settings.clip_norm, *settings.clip_value))
        self._measures_all = all(norm is not None for norm in settings.clip_norm)
        # A network that has a step of its own needs none: the names of weights are unique in a cell.
        prefix = plan.prefix if plan.is_manual else ""
        averages = [
            MovingAverage(decay, weights, prefix)
            for decay, weights in zip(settings.ema_decay, plan.weights)
            if decay is not None
        ]
        self.averages = nn.CellList(averages, auto_prefix=False)

    def measure(self, grads):
        """Measures the norms. Returns whether each network's gradients are finite, None unless all are measured."""
        if not self._clips_any:
            return None
        finite = ()
        for i in range(len(self.clips)):
            finite = (*finite, self.clips[i].measure(grads[i]))
        return finite if self._measures_all else None

    def apply(self, grads, is_first):
        """Updates the weights; `is_first` tells whether no step was applied before. Returns what to wait for."""
        for average in self.averages:
            only_if(is_first, average.begin)
        if self._clips_any:
            grads = self._clipped(grads)
        done = self.optimizers.update(grads)
        if self.after_update is not None:
            self.after_update()
        for average in self.averages:
            done = ops.depend(done, average())
        return done

    def _clipped(self, grads):
        clipped = ()
        for i in range(len(self.clips)):
            clipped = (*clipped, self.clips[i](grads[i]))
        return clipped

    def norms(self):
        """Reads the global norm of each network at the last check, None where it is not measured."""
        return [clip.value() for clip in self.clips]

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        return self.optimizers.shared_state()
