"""Tensors put together, since starting an operator for each costs more than copying small ones."""

import math

from mindspore import dtype as mstype
from mindspore import ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim

# The most elements of a tensor that a GPU or an NPU copies in less time than it takes to start an operator on it: on an
# H200, MindSpore took 21 us for that, in which a V100 copies as many. And the most elements of what they are joined to.
_LARGEST_JOINED = 2**21
_LARGEST_RESULT = 2**23
# Of fewer, the operator that joins them saves none.
_FEWEST_JOINED = 3


@gradients.of_one("Tensor")
def _flat(tensor):
    tensor = prim.cast(tensor, mstype.float32)
    return tensor if tensor.ndim == 1 else tensor.reshape((-1,))


@gradients.of_one("Tensor")
def _with_an_axis(tensor):
    tensor = prim.cast(tensor, mstype.float32)
    return tensor.reshape((1,)) if tensor.ndim == 0 else tensor


def as_vector(tensors):
    """Returns the elements of all tensors as one vector, in float32."""
    return prim.concat(gradients.map_each(_flat, tensors))


def fewer(tensors):
    """
    Returns fewer tensors with the same elements, in float32. Those that differ in the first axis only are joined: a
    vector of all would take a Reshape of each, an operator more.
    """
    groups, others = _groups(gradients.forms(tensors))
    if len(groups) == 0:
        return tensors
    result = gradients.items(tensors, others) if len(others) > 0 else ()
    for group in groups:
        result = (*result, prim.concat(gradients.map_each(_with_an_axis, gradients.items(tensors, group))))
    return result


@ops.constexpr
def _groups(shapes):
    """Returns tuples of the positions of the shapes to join, and the positions of the others."""
    sizes = list(map(math.prod, shapes))
    alike = {}
    for i, shape in enumerate(shapes):
        if 0 <= sizes[i] <= _LARGEST_JOINED:
            alike.setdefault(tuple(shape[1:]), []).append(i)
    groups = [group for positions in alike.values() for group in in_parts(positions, sizes, _LARGEST_RESULT)]
    groups = tuple(group for group in groups if len(group) >= _FEWEST_JOINED)
    joined = {i for group in groups for i in group}
    return groups, tuple(i for i in range(len(shapes)) if i not in joined)


def in_parts(positions, sizes, most):
    """Returns the positions as tuples, each of one, or of more whose sizes are up to `most` in all."""
    parts = []
    total = 0
    for i in positions:
        total += sizes[i]
        if parts and total <= most:
            parts[-1] = (*parts[-1], i)
        else:
            parts.append((i,))
            total = sizes[i]
    return parts
