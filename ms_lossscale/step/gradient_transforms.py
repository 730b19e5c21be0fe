"""The seam for whatever changes the gradients between the backward and the optimizer: clipping, say."""

from mindspore import nn

from ms_lossscale.step.of_network import all_of, of_network


class GradientTransform(nn.Cell):
    """
    Base class of what is done to the gradients of one network.

    Gradients come as a flat tuple, in which small ones of one shape may be stacked as one tensor.

    Args:
        norm (GlobalNorm, optional): What `measure` measures. Default: ``None`` .

    Inputs:
        - **grads** (tuple[Tensor]) - Unscaled float32 gradients of a step that did not overflow.

    Outputs:
        tuple[Tensor], of the same shapes.
    """

    # Whether `measure` tells if all gradients are finite.
    tells = False
    # Whether `construct`, if it comes first, takes gradients that are not divided yet, by what `measure` was given.
    unscales = False

    def __init__(self, norm=None):
        super().__init__(auto_prefix=False)
        self.norm = norm

    def measure(self, grads, divisor):
        """
        Looks at the gradients before the verdict, when they may be not finite.

        Args:
            grads (tuple[Tensor]): The gradients times `divisor`.
            divisor (Tensor): Float32 of shape :math:`()`.

        Returns:
            tuple, of one bool tensor if that tells whether all are finite, else empty.
        """
        return ()

    def construct(self, grads):
        raise NotImplementedError


class NoTransforms(nn.Cell):
    """Gradients stay as they are, and are not measured. Inputs, outputs and methods as those of GradientTransforms."""

    tells = unscales = False

    def __init__(self, networks):
        super().__init__(auto_prefix=False)
        self._networks = networks

    def measure(self, grads, divisor):
        return ()

    def construct(self, grads):
        return grads

    def measures(self):
        return [None] * self._networks

    def norms(self):
        return self.measures()


class GradientTransforms(nn.Cell):
    """
    The transforms of all networks of a step, each network's in their order.

    Args:
        of_each (list[list[GradientTransform]]): For each network its transforms.
        packing (Packing): Tells which gradients are whose.
    """

    def __init__(self, of_each, packing):
        super().__init__(auto_prefix=False)
        self.of_each = nn.CellList([nn.CellList(its, auto_prefix=False) for its in of_each], auto_prefix=False)
        self.packing = packing
        # Of all networks, as those of GradientTransform of one.
        self.tells = all(any(transform.tells for transform in its) for its in of_each)
        self.unscales = all(bool(its) and its[0].unscales for its in of_each)

    def measure(self, grads, divisor):
        """For each network whether its gradients are finite, as a tuple; of use only if that `tells`."""
        are_finite = ()
        for i, transforms in enumerate(self.of_each):
            its_grads, its_divisor = self.packing.of_network(i, grads), of_network(i, divisor)
            told = ()
            for transform in transforms:
                told += transform.measure(its_grads, its_divisor)
            if self.tells:
                are_finite += (all_of(told),)
        return are_finite

    def construct(self, grads):
        transformed = ()
        for i, transforms in enumerate(self.of_each):
            its_grads = self.packing.of_network(i, grads)
            for transform in transforms:
                its_grads = transform(its_grads)
            transformed += its_grads
        return transformed

    def measures(self):
        """For each network what measures its global norm, or None."""
        return [next((transform.norm for transform in its if transform.norm is not None), None) for its in self.of_each]

    def norms(self):
        """Reads for each network its global norm at the last verdict; None where nothing measures it."""
        return [measure and measure.value_of(*measure.parts()) for measure in self.measures()]


def make_transforms(of_each, packing):
    """What is done to the gradients, given for each network a list of transforms."""
    if any(of_each):
        return GradientTransforms(of_each, packing)
    return NoTransforms(len(of_each))
