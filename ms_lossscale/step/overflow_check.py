"""The overflow check of a step: what overflowed, and what else was not finite."""

import itertools

import numpy as np
from mindspore import Tensor, get_context, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of, of_any_network
from ms_lossscale._mindspore import is_library_cell
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.overflow_detector import FiniteGradients, NoCheck
from ms_lossscale.step.own_cells import Asked


class OverflowCheck(nn.Cell):
    """
    Finds overflows in the gradients of the networks that share a check, or of each loss scale if `scale_shape` is (N,),
    and tells where they come from. `losses` is the number of losses that it is given.

    What else shows an overflow than gradients is its `evidence`: two tuples of one flag, or empty, whether a loss has a
    weight that can't be one, of each loss scale, and whether what the forward wrote is not finite.
    """

    def __init__(self, networks, weights, loss_scales, settings, losses, scale_shape):
        super().__init__(auto_prefix=False)
        checks, flat = loss_scales[0].drop_overflow_update, list(itertools.chain(*weights))
        self.detector = settings.overflow_detector if checks else NoCheck()
        self.starts = type(self.detector) not in (FiniteGradients, NoCheck)
        looks = type(self.detector) is FiniteGradients
        self._looks = looks and get_context("device_target") == "CPU"
        self._norms_suffice = looks and all(norm is not None for norm in settings.clip_norm)
        self._detect = self.detector
        if not is_library_cell(self.detector):
            self._detect = Asked(self.detector, "one answer over all gradients", takes_numbers=True)
        self._are_small = tuple(gradients.is_small(its.shape) for its in flat)
        self._zero = Tensor(0.0, mstype.float32)
        self._has_own_scales = len(scale_shape) > 0
        # Numbers in place of flags, since graph mode would merge bool constants with a network's own.
        numbers = np.repeat(np.arange(len(weights)), [len(its) for its in weights])
        self._whose = Tensor((numbers == np.arange(len(weights))[:, None]).astype(np.float32))
        # Which losses, and whether what the forward writes, keep each loss scale from falling. Where an InputGradient
        # works on a scale, a lower one may mend the forward.
        patient = [checks and not its.backoff_if_loss_not_finite for its in loss_scales]
        of_losses = np.zeros((len(loss_scales), losses), np.float32)
        for i, j in itertools.product(range(len(loss_scales)), range(losses)):
            its = networks if losses == 1 or len(networks) == 1 else (networks[j],)
            is_its = losses == 1 or len(loss_scales) == 1 or i == j
            of_losses[i, j] = patient[i] and is_its and not holds_input_gradient(its, loss_scales[i])
        of_state = [waits and not holds_input_gradient(networks, its) for waits, its in zip(patient, loss_scales)]
        self._of_losses, self._of_state = Tensor(of_losses), Tensor(np.array(of_state, np.float32))
        self.is_patient = any(patient)

    def are_wrong(self, weights):
        """Returns for each loss scale whether a weight of a loss is negative, infinite or NaN."""
        weights = prim.stack(weights)
        right = prim.logical_and(prim.isfinite(weights), prim.greater_equal(weights, self._zero))
        return prim.logical_not(right if self._has_own_scales else prim.reduce_all(right, ()))

    def find(self, grads, norms_finite, evidence):
        """
        Finds an overflow in unscaled gradients; `norms_finite` are flags of each network whose norm was measured.
        Returns it, and a tuple of whether each gradient is finite, empty if that was not looked at.
        """
        of_each, are_finite = (), ()
        if self._norms_suffice and len(norms_finite) > 0:
            for is_finite in norms_finite:
                of_each += (prim.logical_not(is_finite),)
            overflow = any_of(of_each)
        elif self._looks:
            are_finite = (gradients.check(grads, self._are_small),)
            overflow = prim.logical_not(prim.reduce_all(are_finite[0], ()))
        else:
            overflow = self._detect(grads)
        overflow = any_of((overflow,) + evidence[1])
        if not self._has_own_scales:
            overflow = any_of((overflow,) + evidence[0])
        else:
            if len(of_each) > 0:
                of_each = prim.stack(of_each)
            else:
                are_finite = are_finite if len(are_finite) > 0 else (gradients.each_finite(grads),)
                not_finite = prim.cast(prim.logical_not(are_finite[0]), mstype.float32)
                of_each = prim.greater(prim.reduce_sum(prim.mul(self._whose, not_finite), (1,)), self._zero)
            of_each = any_of((prim.logical_and(of_each, overflow),) + evidence[0])
            # If no gradient tells whose it was, all count.
            overflow = prim.logical_or(of_each, prim.logical_and(overflow, prim.logical_not(of_any_network(of_each))))
        return overflow, are_finite

    def tell(self, losses, evidence, number):
        """
        Returns whether a loss, or its weight, was not finite, and whether what the forward wrote became so. Where that
        is not known, it is False, which is computed from any `number`.
        """
        lost, spoilt = (), evidence[1]
        for wrong in evidence[0]:
            lost += (of_any_network(wrong),)
        if len(losses) > 0:
            lost += (prim.logical_not(prim.reduce_all(gradients.each_finite(losses), ())),)
        return any_of(lost) if len(lost) > 0 else gradients.never(number), (
            spoilt[0] if len(spoilt) > 0 else gradients.never(number)
        )

    def of_forward(self, losses, evidence, overflow):
        """
        Returns for each scale whether it stands still, since the forward of a call was not finite. Which network wrote
        what became so is not known: with scales of their own, it counts where nothing else tells whose overflow it is.
        """
        total, not_finite = ops.zeros_like(self._of_state), ()
        if len(losses) > 0:
            not_finite = (prim.logical_not(gradients.each_finite(losses)),)
            for wrong in evidence[0]:
                # With one scale for all, and for the one loss of a ManualStep, it does not tell which one's it is.
                its = wrong if wrong.shape == not_finite[0].shape else of_any_network(wrong)
                not_finite = (prim.logical_or(not_finite[0], its),)
            of_losses = prim.mul(self._of_losses, prim.cast(not_finite[0], mstype.float32))
            total = prim.add(total, prim.reduce_sum(of_losses, (1,)))
        for counts in evidence[1]:
            if self._has_own_scales:
                counts = prim.logical_and(counts, prim.reduce_all(overflow, ()))
                for flags in not_finite:
                    counts = prim.logical_and(counts, prim.logical_not(prim.reduce_any(flags, ())))
            total = prim.add(total, prim.mul(self._of_state, prim.cast(counts, mstype.float32)))
        of_forward = prim.greater(total, self._zero)
        return of_forward if self._has_own_scales else of_forward.reshape(())
