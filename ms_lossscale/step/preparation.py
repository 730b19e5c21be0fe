"""From the scaled gradients of a call to those that the optimizers get."""

import itertools

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale.step.optimizers import updating


@gradients.of_each("Bool", "Tensor")
def _infinite_as_float16(becomes_float16, tensor):
    """Makes elements infinite where a cast to float16 would, in the tensors that a tuple of bools selects."""
    if not becomes_float16:
        return tensor
    rounded = prim.cast(prim.cast(tensor, mstype.float16), mstype.float32)
    # Finite elements are not rounded, so that the norm and clipping are exact.
    return prim.select(prim.isfinite(rounded), tensor, rounded)


class Preparation(nn.Cell):
    """
    Unscales gradients, divides those of a step by the weights of its losses, reduces them across ranks, and transforms
    them.
    """

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        settings = plan.settings
        weights = plan.weights
        steps = settings.gradient_accumulation_steps
        self.ranks = plan.ranks
        self._reduce = plan.grad_reducer
        self._scale_of_network = plan.scale_of_network
        self._lengths = tuple(map(len, weights))
        self._zero = Tensor(0.0, mstype.float32)
        self._steps = Tensor(float(steps), mstype.float32)
        self._share = Tensor(1.0 / steps, mstype.float32)
        self._drops_calls = plan.drops_calls
        # Whether each network's loss has a weight, or may have one.
        self._may_be_weighted = (True,) * len(weights) if plan.is_manual else settings.weighted
        self._transforms = None
        if any(settings.gradient_transforms):
            transforms = [Transforms(plan.owner, of_network) for of_network in settings.gradient_transforms]
            self._transforms = nn.CellList(transforms, auto_prefix=False)
        # The optimizer's cast to float16 comes after the overflow check.
        updated = [updating(optimizer).parameters for optimizer in plan.optimizers]
        become_float16 = tuple(tuple(each.dtype == mstype.float16 for each in of_network) for of_network in updated)
        self._become_float16 = become_float16 if plan.checks and any(itertools.chain(*become_float16)) else None

    def unscale(self, grads, scales):
        """Divides gradients by their scales, in float32, and by the calls of a cycle."""
        factors = self.factors(scales)
        unscaled = ()
        for i in range(len(grads)):
            unscaled = (*unscaled, gradients.multiply(grads[i], factors[i]))
        return unscaled

    def factors(self, scales):
        """Returns for each network by what its scaled gradients are multiplied."""
        factors = ()
        for number in self._scale_of_network:
            factors = (*factors, prim.div(self._share, scales[number]))
        return factors

    def average(self, grads, loss_weights, cycle_is_weighted=None):
        """
        Divides the gradients of a step by the sums of their losses' weights, and no longer by the calls of a cycle.
        Whether the cycle of a ManualStep has any weights, only its flag tells.
        """
        sums = loss_weights
        if self.ranks is not None and (any(self._may_be_weighted) or self._drops_calls):
            # Where calls are dropped, ranks may have kept other numbers of them.
            unweighted = self.ranks.mean(loss_weights) if self._drops_calls else loss_weights
            sums = self._over_ranks(loss_weights, unweighted, cycle_is_weighted)
        averages = ()
        for i in range(len(grads)):
            # 0 if there is nothing in the mean; not where the weights are <= 0: a NaN must stay one.
            is_empty = prim.equal(sums[i], self._zero)
            # A division by 0 would set an NPU's status register.
            divisor = prim.select(is_empty, self._steps, sums[i])
            factor = prim.select(is_empty, self._zero, prim.div(self._steps, divisor))
            averages = (*averages, gradients.multiply(grads[i], factor))
        return averages

    def _over_ranks(self, loss_weights, unweighted, cycle_is_weighted):
        of_ranks = self.ranks.sum_like_gradients(loss_weights)
        sums = ()
        for i in range(len(loss_weights)):
            if cycle_is_weighted is not None:
                sums = (*sums, prim.select(cycle_is_weighted, of_ranks[i], unweighted[i]))
            else:
                sums = (*sums, of_ranks[i] if self._may_be_weighted[i] else unweighted[i])
        return sums

    def prepare(self, grads):
        """Prepares the unscaled gradients of a step."""
        grads = grads if self._reduce is None else gradients.parted(self._reduce(gradients.flat(grads)), self._lengths)
        grads = grads if self._transforms is None else self._transformed(grads)
        return grads if self._become_float16 is None else _infinite_as_float16(self._become_float16, grads)

    def _transformed(self, grads):
        transformed = ()
        for i in range(len(self._transforms)):
            transformed = (*transformed, self._transforms[i](grads[i]))
        return transformed


class Transforms(nn.Cell):
    """Calls the gradient transforms of one network, in their order, and checks what each returns."""

    def __init__(self, owner, transforms):
        super().__init__(auto_prefix=False)
        self.transforms = nn.CellList(list(transforms), auto_prefix=False)
        must = (
            f"For '{owner}', what is passed as 'gradient_transforms' must return a tuple of as many gradients as it is "
            f"called with, of the same shapes, but"
        )
        self._musts = tuple(f"{must} {type(transform).__name__} returned" for transform in transforms)

    def construct(self, grads):
        for i in range(len(self.transforms)):
            transformed = self.transforms[i](grads)
            if not isinstance(transformed, (tuple, list)):
                raise TypeError(self._musts[i] + " something else than a tuple.")
            transformed = tuple(transformed)
            if _forms_fit(self._musts[i], gradients.forms(grads), gradients.forms(transformed)):
                grads = gradients.to_float32(transformed)
        return grads


@ops.constexpr
def _forms_fit(must, given, returned):
    if returned != given:
        raise ValueError(
            f"{must} {len(returned)} of {', '.join(map(str, returned))} for {len(given)} of "
            f"{', '.join(map(str, given))}. Return one gradient for each weight, in their order."
        )
    return True
