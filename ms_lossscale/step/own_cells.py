"""Cells of the user's own in a step: what they return is checked, and their state gets names of its own."""

import itertools

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale.loss_scale import LossScale
from ms_lossscale.step.optimizers import add_prefix, network_prefix, parts_of_networks


class Asked(nn.Cell):
    """Asks a Cell a question, to which the answer is a bool Tensor of shape (); if `takes_numbers`, also a number's."""

    def __init__(self, cell, question, takes_numbers=False):
        super().__init__(auto_prefix=False)
        self.cell, self._takes_numbers = cell, takes_numbers
        self._must = (
            f"For '{type(cell).__name__}', 'construct' must return {question}, a bool Tensor of shape (), but it "
            f"returned something else. Compare Tensors, and reduce several answers with .any()."
        )

    def construct(self, *inputs):
        answer = self.cell(*inputs)
        if not isinstance(answer, Tensor) or not (self._takes_numbers or answer.dtype == mstype.bool_):
            raise TypeError(self._must)
        if answer.size != 1:
            raise ValueError(self._must)
        return prim.cast(answer.reshape(()), mstype.bool_)


class Transforms(nn.Cell):
    """Calls the gradient transforms of one network, in their order, and checks what each returns."""

    def __init__(self, owner, transforms):
        super().__init__(auto_prefix=False)
        self.transforms = nn.CellList(list(transforms), auto_prefix=False)
        must = (
            f"For '{owner}', what is passed as 'gradient_transforms' must return a tuple of as many gradients as it is "
            f"called with, of the same shapes, but"
        )
        self._musts = tuple(f"{must} {type(each).__name__} returned" for each in transforms)

    def construct(self, grads):
        for i in range(len(self.transforms)):
            transformed = self.transforms[i](grads)
            if not isinstance(transformed, (tuple, list)):
                raise TypeError(self._musts[i] + " something else than a tuple.")
            transformed = tuple(transformed)
            if _forms_fit(self._musts[i], gradients.forms(grads), gradients.forms(transformed)):
                grads = gradients.to_float32(transformed)
        return grads


class OfEachNetwork(nn.Cell):
    """Calls a Cell for each network with its part of a flat tuple of gradients, of which each has so many."""

    def __init__(self, cells, lengths):
        super().__init__(auto_prefix=False)
        self.of_each = nn.CellList(cells, auto_prefix=False)
        self._parts = parts_of_networks(lengths)

    @classmethod
    def of(cls, cells, lengths):
        """Returns the only Cell, or what calls each."""
        return cells[0] if len(cells) == 1 else cls(cells, lengths)

    def construct(self, grads):
        results = ()
        for i in range(len(self.of_each)):
            results += self.of_each[i](grads[self._parts[i]])
        return results

    def measure(self, grads):
        """Calls the `measure` of each instead."""
        results = ()
        for i in range(len(self.of_each)):
            results += self.of_each[i].measure(grads[self._parts[i]])
        return results


@ops.constexpr
def _forms_fit(must, given, returned):
    if returned != given:
        raise ValueError(
            f"{must} {len(returned)} of {', '.join(map(str, returned))} for {len(given)} of "
            f"{', '.join(map(str, given))}. Return one gradient for each weight, in their order."
        )
    return True


def state_of(cells, networks):
    """
    Returns the Parameters of transforms, or of a detector, that belong neither to the networks nor to the update rule
    of a loss scale that they look at: what a rule writes in a step that is skipped must stay.
    """
    others = {id(parameter) for network in networks for parameter in network.get_parameters()}
    for cell in cells:
        of_rules = (its for _, its in cell.cells_and_names() if isinstance(its, LossScale))
        others.update(id(each) for its in of_rules for each in its.get_parameters(expand=False))
    of_cells = {id(parameter): parameter for cell in cells for parameter in cell.get_parameters()}
    return [parameter for i, parameter in of_cells.items() if i not in others]


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
