"""The global norms of a step's gradients."""

import itertools

from mindspore import Parameter, ParameterTuple, get_context, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._joined_tensors import fewer
from ms_lossscale._values import as_float32

# If the sum of squares lies outside these, squares have overflowed or been flushed to zero. It is then computed from
# the gradients times a power of two, which brings their squares back into float32's range without rounding.
_SMALLEST_SUM = 2.0**-80
_LARGEST_SUM = 2.0**126
_ENLARGE = 2.0**96
_REDUCE = 2.0**-96


def _square_sum(tensor):
    """Returns the sum of the squares of all elements, float32 of shape ()."""
    # In float16, squares overflow from 256 on.
    return gradients.sum_of(prim.square(prim.cast(tensor, mstype.float32)))


_square_sums = gradients.of_each("Tensor")(_square_sum)


@gradients.of_one("Tensor", "Bool", "Tensor")
def _square_sum_where(zero, counts, tensor):
    """Returns the same if `counts`, a bool, else `zero`."""
    if counts:
        return _square_sum(tensor)
    return zero


class Norm(nn.Cell):
    """
    Measures the global norm of gradients, over the whole range of float32. Returns two float32 Tensors of shape
    :math:`()`, `root` and `power`: the norm, which may exceed float32, is `root / power`. `root` is finite if and only
    if the gradients are. `split` says for each gradient whether each rank has its own part of the weight.

    Of scaled gradients, `factor`, at most 1, is what unscales them: the norm is that of the unscaled ones.
    """

    def __init__(self, ranks, split):
        super().__init__(auto_prefix=False)
        self.ranks = ranks if any(split) else None
        self._joins = get_context("device_target") != "CPU"
        self._split = tuple(split)
        self._shared = tuple(not is_split for is_split in split)
        self._zero = as_float32(0.0)
        self._one = as_float32(1.0)
        self._smallest = as_float32(_SMALLEST_SUM)
        self._largest = as_float32(_LARGEST_SUM)
        self._enlarge = as_float32(_ENLARGE)
        self._reduce = as_float32(_REDUCE)

    def construct(self, grads, factor=None):
        of_scaled = self._sum_of_squares(grads)
        total = of_scaled if factor is None else prim.mul(prim.mul(of_scaled, factor), factor)
        power = self._one
        if prim.logical_or(prim.less(total, self._smallest), prim.greater(of_scaled, self._largest)):
            if factor is not None:
                grads = gradients.multiply(grads, factor)
                total = self._sum_of_squares(grads)
            power = self._power_for(total)
            total = self._sum_of_squares(gradients.multiply(grads, power))
        return prim.sqrt(total), power

    def _power_for(self, total):
        """Returns the power of two that brings squares with this sum into range, 1 if they are."""
        is_outside = prim.logical_or(prim.less(total, self._smallest), prim.greater(total, self._largest))
        power = prim.select(prim.less(total, self._one), self._enlarge, self._reduce)
        return prim.select(is_outside, power, self._one)

    def _sum_of_squares(self, grads):
        if self.ranks is None:
            return prim.addn(_square_sums(fewer(grads) if self._joins else grads))
        of_ranks = self.ranks.sum(self._sum_where(self._split, grads))
        return prim.add(of_ranks, self._sum_where(self._shared, grads))

    def _sum_where(self, counts, grads):
        return prim.addn(gradients.map_each(ops.partial(_square_sum_where, self._zero), counts, grads))


class LastNorm(nn.Cell):
    """The global norm of one network's gradients at the last check, if it is measured."""

    def __init__(self, plan, number):
        super().__init__(auto_prefix=False)
        prefix = plan.prefixes[number]
        self.norm = None
        if plan.settings.clip_norm[number] is not None:
            self.norm = Norm(plan.ranks, plan.split[number])
            self.root = Parameter(as_float32(0.0), name=f"{prefix}clipping.root", requires_grad=False)
            self.power = Parameter(as_float32(1.0), name=f"{prefix}clipping.power", requires_grad=False)

    def measure(self, grads, factor):
        """Measures the norm. Returns whether it is finite; None if it is not measured."""
        if self.norm is None:
            return None
        root, power = self.norm(grads, factor)
        prim.assign(self.root, root)
        prim.assign(self.power, power)
        return prim.isfinite(root)

    def value(self):
        """Reads the norm, a float, or None if it is not measured."""
        return None if self.norm is None else float(self.root.asnumpy()) / float(self.power.asnumpy())


class Norms(nn.Cell):
    """The global norms of the networks' gradients, each where a `clip_norm` asks for it."""

    def __init__(self, plan):
        super().__init__(auto_prefix=False)
        self.of_network = nn.CellList([LastNorm(plan, i) for i in range(len(plan.optimizers))], auto_prefix=False)
        measured = [bound is not None for bound in plan.settings.clip_norm]
        self.measures_any = any(measured)
        self._measures_all = all(measured)
        written = [parameter for norm in self.measured() for parameter in (norm.root, norm.power)]
        # Hidden from MindSpore: they are those of the norms.
        object.__setattr__(self, "_written", ParameterTuple(written))

    def measure(self, grads, factors):
        """
        Measures the norms of gradients. `factors` unscales those of each network, None if they are unscaled. Returns
        for each network whether its norm is finite, and so its gradients are; None unless all are measured.
        """
        finite = ()
        for i in range(len(self.of_network)):
            finite = (*finite, self.of_network[i].measure(grads[i], factors[i]))
        return finite if self._measures_all else None

    def lose_unless(self, is_known):
        """Makes the norms that are measured not finite unless `is_known`. Returns what to wait for."""
        divisor = prim.cast(is_known, mstype.float32)
        lost = ()
        for norm in self.of_network:
            if norm.norm is not None:
                lost = (*lost, prim.assign(norm.root, prim.div(norm.root, divisor)))
        return lost

    def copied(self):
        """Copies what a measurement writes."""
        return gradients.copy(self._written) if self.measures_any else ()

    def restore(self, copies):
        """Undoes a measurement. Returns what to wait for."""
        return gradients.assign(self._written, copies) if self.measures_any else copies

    def values(self):
        """Reads the norm of each network, None where it is not measured."""
        return [norm.value() for norm in self.of_network]

    def measured(self):
        """Returns those that are measured."""
        return [norm for norm in self.of_network if norm.norm is not None]


def norm_of_all(plan):
    """Returns what measures the global norm of the gradients of all networks, as one flat tuple."""
    return Norm(plan.ranks, tuple(itertools.chain(*plan.split)))
