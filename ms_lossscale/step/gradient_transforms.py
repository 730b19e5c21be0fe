"""What happens to gradients before the overflow check: the user's transforms, and the overflows of casts to float16."""

import itertools
from collections.abc import Sequence

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale.forward_state.reading import Reading
from ms_lossscale.loss_scale import LossScale
from ms_lossscale.step.optimizers import add_prefix, network_prefix
from ms_lossscale.step.packing import Packing


class OwnTransform(nn.Cell):
    """Calls a user's gradient transform for one network, and checks what it returns."""

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
        fit = _forms_fit(self._must, gradients.forms(grads), gradients.forms(transformed))
        return gradients.to_float32(transformed) if fit else ()


@ops.constexpr
def _forms_fit(must, given, returned):
    if returned != given:
        raise ValueError(
            f"{must} {len(returned)} of {', '.join(map(str, returned))} for {len(given)} of "
            f"{', '.join(map(str, given))}. Return one gradient for each weight, in their order."
        )
    return True


class GradientTransforms(nn.Cell):
    """Applies the user's gradient transforms, those of each network in their order."""

    def __init__(self, owner: str, of_each: Sequence[Sequence[nn.Cell]], packing: Packing) -> None:
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
    Makes those gradients infinite that the optimizer's cast to their weight's float16 would make infinite, since that
    cast comes after the overflow check.
    """

    def __init__(self, become_float16: tuple[bool, ...]) -> None:
        super().__init__(auto_prefix=False)
        self._become_float16 = become_float16

    def construct(self, grads):
        return gradients.infinite_as_float16(self._become_float16, grads)


def stages_before_check(owner, ranks, gradient_transforms, packing, checks):
    """Returns a list of the stages that change gradients before the overflow check."""
    stages = [ranks.grad_reducer] if ranks.exchanges else []
    if any(gradient_transforms):
        stages.append(GradientTransforms(owner, gradient_transforms, packing))
    become_float16 = tuple(dtype == mstype.float16 for dtype in packing.dtypes)
    if checks and any(become_float16):
        stages.append(Float16Overflow(become_float16))
    return stages


def state_of(cells, networks):
    """
    Returns the Parameters of transforms, or of a detector, that belong neither to the networks nor to the update rule
    of a loss scale that they look at: what a rule writes in a step that is skipped must stay.
    """
    others = {id(parameter) for network in networks for parameter in network.get_parameters()}
    for cell in cells:
        others.update(*(_written_by_rule(its) for _, its in cell.cells_and_names() if isinstance(its, LossScale)))
    of_cells = {id(parameter): parameter for cell in cells for parameter in cell.get_parameters()}
    return [parameter for i, parameter in of_cells.items() if i not in others]


def _written_by_rule(loss_scale):
    reading = Reading()
    reading.read([loss_scale.next_scale])
    return {*reading.written, *reading.doubted, *(id(its.parameter) for its in loss_scale.bounds())}


def prefix_own_states(of_each, networks, what="transform"):
    """
    Makes the names of the transforms' state unique, or of the conditions'. A prefix goes to each with a name that an
    earlier one in its list has, and to each that only one of several networks has.
    """
    for i, transforms in enumerate(of_each):
        taken = {}
        for j, transform in enumerate(transforms):
            its_state = state_of([transform], networks)
            if any(taken.setdefault(each.name, each) is not each for each in its_state):
                add_prefix(f"{what}_{j}.", its_state)
        of_others = set(itertools.chain(*of_each[:i], *of_each[i + 1 :]))
        if len(of_each) > 1:
            own = [transform for transform in transforms if transform not in of_others]
            add_prefix(network_prefix(i), state_of(own, networks))
