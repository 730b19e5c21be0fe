"""Which loss scales stand still where a forward was not finite: `backoff_if_loss_not_finite=False`."""

from mindspore import nn

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import all_of, any_of
from ms_lossscale.input_gradient import holds_input_gradient


class Patience(nn.Cell):
    """
    Tells which loss scales stand still, since a forward was not finite, which no lower scale mends. Where an
    InputGradient works on a scale, a lower one may mend the forward.
    """

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        # For each scale, the losses that keep it from falling, and whether what the forward wrote does.
        self._losses_of_scale = tuple(_losses_of(plan, i) for i in range(len(plan.loss_scales)))
        self._counts_state = tuple(
            _waits(loss_scale) and not holds_input_gradient(plan.networks, loss_scale)
            for loss_scale in plan.loss_scales
        )

    def stand_still(self, call, verdict, overflows):
        """
        Returns for each scale whether it stands still. Which network wrote what became not finite is not known: with
        scales of their own, that counts where nothing else tells whose overflow it is.
        """
        lost = self._lost(call, verdict)
        stands_still = ()
        for i in range(len(overflows)):
            flags = (gradients.never(call["scales"][i]),)
            if len(lost) > 0:
                for j in self._losses_of_scale[i]:
                    flags = (*flags, lost[j])
            if "state_not_finite" in verdict and self._counts_state[i]:
                counts = verdict["state_not_finite"]
                if len(overflows) > 1:
                    counts = prim.logical_and(counts, all_of(overflows))
                    if len(lost) > 0:
                        counts = prim.logical_and(counts, prim.logical_not(any_of(lost)))
                flags = (*flags, counts)
            stands_still = (*stands_still, any_of(flags))
        return stands_still

    def _lost(self, call, verdict):
        """Returns for each loss whether it is not finite, or its weight can't be one."""
        lost = ()
        losses = call["losses"]
        for i in range(len(losses)):
            flag = prim.logical_not(gradients.is_finite(losses[i]))
            if "impossible_weights" in verdict:
                # The one loss of a ManualStep has the same weight for all networks.
                flag = prim.logical_or(flag, verdict["impossible_weights"][i])
            lost = (*lost, flag)
        return lost


def _waits(loss_scale):
    return loss_scale.drop_overflow_update and not loss_scale.backoff_if_loss_not_finite


def _losses_of(plan, number):
    """Returns the numbers of the losses that keep this scale from falling."""
    loss_scale = plan.loss_scales[number]
    if not _waits(loss_scale):
        return ()
    is_shared = plan.losses == 1 or not plan.has_own_scales
    candidates = range(plan.losses) if is_shared else (number,)
    # One network may compute all losses, and the one loss of a ManualStep may be that of all networks.
    has_all = plan.losses == 1 or len(plan.networks) == 1
    return tuple(
        i for i in candidates if not holds_input_gradient(plan.networks if has_all else (plan.networks[i],), loss_scale)
    )
