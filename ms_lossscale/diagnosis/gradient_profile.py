"""Profiles the gradients of one loss: one pass over the batches after the other, each at a loss scale of its own."""

import numpy as np
from mindspore import dtype as mstype

from ms_lossscale._values import are_finite
from ms_lossscale.diagnosis.distribution import SMALLEST_NORMAL, Distribution
from ms_lossscale.diagnosis.gradient_report import largest_scale

# How much smaller the next scale to try is where gradients overflow, how much larger where all of them are zero, and
# how large it gets then.
_DOWN, _UP, _HIGHEST = 2.0**4, 2.0**16, 2.0**64

# Below it bfloat16, with its 8 bits, holds numbers that float16 does not.
_FINER_IN_BFLOAT16 = np.float32(2.0**-17)


def last_profile(part, loss_scale, run):
    """
    Runs a part at one scale after the other, as :func:`profile_gradients` says. Returns what is to be reported.

    Args:
        part (TrainedPart): The loss and its weights.
        loss_scale (Union[float, None]): The only scale; None: those that suggest themselves.
        run (Callable): Called with a loss scale and the smallest one that may be tried. Returns a GradientProfile.
    """
    if loss_scale is not None:
        return run(loss_scale, loss_scale)
    profile = _without_overflow(run, part.loss_scale or 1.0, part.floor)
    while part.loss_scale is None and profile.quantised():
        is_known = profile.largest is not None
        larger = largest_scale(profile.largest) if is_known else profile.loss_scale * _UP
        if larger <= profile.loss_scale or (larger > _HIGHEST and not is_known):
            break
        finer = _without_overflow(run, larger, profile.loss_scale * _DOWN)
        if finer.overflowed:
            profile.ceiling = profile.loss_scale
            break
        profile = finer
        if is_known:
            break
    return profile


def _without_overflow(run, scale, smallest):
    profile = run(scale, smallest)
    while profile.is_given_up:
        profile = run(max(profile.loss_scale / _DOWN, smallest), smallest)
    if profile.loss_scale < scale:
        profile.ceiling = profile.loss_scale
    return profile


class GradientProfile:
    """
    The gradients of one part in one pass over the batches.

    Attributes:
        distributions (dict[str, Distribution]): The gradients of each weight.
        largest (Union[float, None]): The absolute value of the largest finite gradient; None if all are zero.
        batches (int): How many batches there were.
        non_finite_losses (set[int]): The numbers of batches whose loss is not finite.
        overflowed (bool): Whether another batch had gradients that are not.
        ceiling (Union[float, None]): The loss scale, if larger ones overflowed.
    """

    def __init__(self, loss_and_grads, loss_scale, smallest_scale, clip_norm):
        self._loss_and_grads = loss_and_grads
        self.part = loss_and_grads.part
        self.loss_scale = loss_scale
        self._smallest_scale = smallest_scale
        self._clip_norm = clip_norm
        self.distributions = {weight.name: Distribution() for weight in self.part.weights}
        # The names of weights whose gradients float16 does not hold, or only as zeros or with fewer bits than a normal
        # number, and of those with values that bfloat16 does not hold.
        self._unfit = set()
        self._lost = set()
        self._finer = set()
        self.largest = None
        self.batches = 0
        self.non_finite_losses = set()
        self.overflowed = False
        self.ceiling = None

    def add(self, batch):
        """Runs a batch, and counts its gradients."""
        loss, grads = self._loss_and_grads.of(self.loss_scale, batch)
        grads = [grad.astype(mstype.float32).asnumpy() for grad in grads]
        if not are_finite([loss]):
            self.non_finite_losses.add(self.batches)
        elif not all(np.isfinite(grad).all() for grad in grads):
            self.overflowed = True
        self.batches += 1
        for name, grad in zip(self.distributions, grads):
            self._look_for_float16(name, grad)
        grads = [grad * np.float32(1.0 / self.loss_scale) for grad in grads]
        largest = [float(np.max(np.abs(grad), initial=0.0, where=np.isfinite(grad))) for grad in grads]
        self.largest = max([self.largest or 0.0, *largest]) or None
        for distribution, grad in zip(self.distributions.values(), self._clipped(grads)):
            distribution.add(grad)

    def _clipped(self, grads):
        if self._clip_norm is None:
            return grads
        norm = np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads))
        # Values that are not finite stay so, since they must be counted as such.
        if not self._clip_norm < norm < np.inf:
            return grads
        return [grad * np.float32(self._clip_norm / norm) for grad in grads]

    def is_zero(self):
        """Returns whether all gradients are exactly zero."""
        return all(distribution.is_all_zero for distribution in self.distributions.values())

    @property
    def is_given_up(self):
        """Whether there will be another pass at a smaller scale."""
        return self.overflowed and self.loss_scale > self._smallest_scale

    def _look_for_float16(self, name, grad):
        """Examines what the backward returned for a weight, in float32."""
        finite = np.abs(grad[np.isfinite(grad)])
        sizes = finite[finite > 0]
        with np.errstate(over="ignore", under="ignore"):
            fits = (sizes.astype(np.float16) == sizes).all()
        if not fits:
            self._unfit.add(name)
        if sizes.size < finite.size or (sizes < SMALLEST_NORMAL).any():
            self._lost.add(name)
        if ((sizes.view(np.uint32) & 0xFFFF > 0) | (sizes < _FINER_IN_BFLOAT16)).any():
            self._finer.add(name)

    def quantised(self):
        """Returns the names of the weights whose gradients lost something in float16 on the way."""
        network = self.part.network
        fitting = self.distributions.keys() - self._unfit
        # Values that float16 holds and bfloat16 does not almost certainly come from it: float32's would have more bits.
        is_float16 = (
            bool(fitting & self._finer)
            or any(weight.dtype == mstype.float16 for weight in network.get_parameters())
            or any(cell.get_flags().get("fp16", False) for _, cell in network.cells_and_names())
        )
        return [name for name in self.distributions if is_float16 and name in fitting & self._lost]
