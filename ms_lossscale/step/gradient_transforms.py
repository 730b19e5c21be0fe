"""What becomes of gradients before they are judged: what the user's transforms do, and what float16 can't hold."""

import itertools
from collections.abc import Sequence

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale.step.packing import AnyPacking
from ms_lossscale.step.parameter_names import add_prefix, network_prefix
from ms_lossscale.step.ranks import AnyRanks


class OwnTransform(nn.Cell):
    """
    A user's transform of the gradients of one network, which may return something else.

    Args:
        owner (str): The training cell's name, for error messages.
        transform (Cell): What is called.

    Inputs:
        - **grads** (tuple[Tensor]) - One gradient for each weight.

    Outputs:
        tuple[Tensor], float32, of the same shapes.
    """

    def __init__(self, owner: str, transform: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.transform = transform
        self._must = (
            f"For '{owner}', what is passed as 'gradient_transforms' must return a tuple of as many gradients as it is "
            f"called with, of the same shapes, but {type(transform).__name__} returned"
        )
        self._a_tensor, self._no_tuple = f"{self._must} one Tensor.", f"{self._must} something else than a tuple."

    def construct(self, grads):
        transformed = self.transform(grads)
        if isinstance(transformed, Tensor):
            raise TypeError(self._a_tensor)
        if not isinstance(transformed, (tuple, list)):
            raise TypeError(self._no_tuple)
        transformed = tuple(transformed)
        _check_forms(self._must, gradients.forms(grads), gradients.forms(transformed))
        return gradients.to_float32(transformed)


@ops.constexpr
def _check_forms(must, given, returned):
    if returned != given:
        raise ValueError(
            f"{must} {len(returned)} of {', '.join(map(str, returned))} for {len(given)} of "
            f"{', '.join(map(str, given))}. Return one gradient for each weight, in their order."
        )
    return True


class GradientTransforms(nn.Cell):
    """
    The user's transforms of the gradients of all networks of a step, each network's in their order.

    Args:
        owner (str): The training cell's name, for error messages.
        of_each (tuple[tuple[Cell]]): For each network its transforms.
        packing (Unpacked): Tells which gradients are whose, and leaves them one by one.

    Inputs:
        - **grads** (tuple[Tensor]) - The gradients of all networks.

    Outputs:
        tuple[Tensor], of the same shapes.
    """

    def __init__(self, owner: str, of_each: Sequence[Sequence[nn.Cell]], packing: AnyPacking) -> None:
        super().__init__(auto_prefix=False)
        checked = [[OwnTransform(owner, transform) for transform in its] for its in of_each]
        self.of_each = nn.CellList([nn.CellList(its, auto_prefix=False) for its in checked], auto_prefix=False)
        self.packing = packing

    def construct(self, grads):
        transformed = ()
        for i, transforms in enumerate(self.of_each):
            its_grads = self.packing.of_network(i, grads)
            for transform in transforms:
                its_grads = transform(its_grads)
            transformed += its_grads
        return transformed


class Float16Overflow(nn.Cell):
    """
    Makes infinite what the cast to its weight's float16 would: the optimizer's cast comes after the overflow check.

    Args:
        become_float16 (tuple[bool]): For each gradient whether it is cast so.

    Inputs and outputs as those of :class:`GradientTransforms`.
    """

    def __init__(self, become_float16: Sequence[bool]) -> None:
        super().__init__(auto_prefix=False)
        self._become_float16 = become_float16

    def construct(self, grads):
        return gradients.infinite_as_float16(self._become_float16, grads)


class Complete(nn.Cell):
    """
    All that happens to a step's gradients before they are judged.

    Args:
        ranks (Union[Alone, Ranks]): Reduce them.
        stages (list[Cell]): What comes then.

    Inputs and outputs as those of :class:`GradientTransforms`.
    """

    def __init__(self, ranks: AnyRanks, stages: list[nn.Cell]) -> None:
        super().__init__(auto_prefix=False)
        self.ranks = ranks
        self.stages = nn.CellList(stages, auto_prefix=False)

    def construct(self, grads):
        grads = self.ranks.reduce(grads)
        for stage in self.stages:
            grads = stage(grads)
        return grads


def make_before_check(owner, gradient_transforms, packing, checks):
    """
    What comes between the ranks' exchange and the overflow check.

    Args:
        owner (str): The training cell's name, for error messages.
        gradient_transforms (tuple[tuple[Cell]]): For each network what the user passed.
        packing (Union[Packing, Unpacked]): Knows the gradients.
        checks (bool): Whether overflows are checked.

    Returns:
        list[Cell], empty if there is nothing to do.
    """
    stages = []
    if any(gradient_transforms):
        stages.append(GradientTransforms(owner, gradient_transforms, packing))
    become_float16 = tuple(dtype == mstype.float16 for dtype in packing.dtypes)
    if checks and any(become_float16):
        stages.append(Float16Overflow(become_float16))
    return stages


def state_of(transforms, networks):
    """The Parameters that transforms have, and the networks have not."""
    of_networks = {id(parameter) for network in networks for parameter in network.get_parameters()}
    of_transforms = {id(parameter): parameter for transform in transforms for parameter in transform.get_parameters()}
    return [parameter for i, parameter in of_transforms.items() if i not in of_networks]


def prefix_own_states(of_each, networks):
    """Gives the state of transforms that only one of several networks has names of its own."""
    for i, transforms in enumerate(of_each):
        of_others = set(itertools.chain(*of_each[:i], *of_each[i + 1 :]))
        if len(of_each) > 1:
            own = [transform for transform in transforms if transform not in of_others]
            add_prefix(network_prefix(i), state_of(own, networks))
