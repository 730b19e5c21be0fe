"""Functions over a tensor or a flat tuple of any length, which may hold sparse gradients (RowTensor)."""

import math

from mindspore import RowTensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _primitives as prim

# The most elements of a small tensor, and the least number of small tensors of one shape that are stacked.
_LARGEST_SMALL, _SMALLEST_GROUP = 2**14, 4
# So many tensors fewer make a step faster by more than what stacking adds to its compilation.
_LEAST_SAVED = 128

# HyperMap, since the call depth of a list comprehension grows with the tuple, and graph mode limits it.
_map = ops.HyperMap()


def _of_one(*types):
    """Makes a function of single tensors, or numbers, into one that `_map` takes, for arguments of these types."""

    def registered(function):
        of_one = ops.MultitypeFuncGraph(function.__name__)
        of_one.register(*types)(function)
        return of_one

    return registered


def _of_each(*types):
    """Makes a function of single tensors into one of tuples of them, or of tuples of tuples."""
    return lambda function: ops.HyperMap(_of_one(*types)(function))


_sum = ops.MultitypeFuncGraph("sum")
_is_finite = ops.MultitypeFuncGraph("is_finite")
_sum_of_squares = ops.MultitypeFuncGraph("sum_of_squares")


@_of_one("Tensor")
def _kind(tensor):
    return (tensor.dtype, tensor.shape)


@_kind.register("RowTensor")
def _kind_sparse(_):
    # Never counts as small.
    return (None, (-1,))


@_of_one("Tensor")
def _form(tensor):
    return tensor.shape


@_form.register("Number")
def _form_number(_):
    return "a number"


@_form.register("None")
def _form_none(_):
    return "None"


@_of_one("Tuple", "Number")
def _pick(values, index):
    return values[index]


@_of_one("Tensor", "Tensor")
def _multiply(factor, tensor):
    return prim.mul(prim.cast(tensor, mstype.float32), factor)


@_multiply.register("Tensor", "RowTensor")
def _multiply_sparse(factor, tensor):
    return RowTensor(tensor.indices, prim.mul(prim.cast(tensor.values, mstype.float32), factor), tensor.dense_shape)


@_sum.register("Tensor")
def _sum_dense(tensor):
    tensor = prim.cast(tensor, mstype.float32)
    if tensor.ndim > 2:
        # The last axis of a convolution's weight is short, and summing it first would be slow.
        tensor = tensor.reshape((tensor.shape[0], -1))
    if tensor.ndim > 1:
        # On CPU, summing rows first is 4 times faster than all axes at once.
        tensor = prim.reduce_sum(tensor, (-1,))
    return prim.reduce_sum(tensor, ())


@_sum.register("RowTensor")
def _sum_sparse(tensor):
    return _sum_dense(tensor.values)


@_is_finite.register("Tensor")
def _is_finite_dense(tensor):
    return prim.reduce_all(prim.isfinite(prim.cast(tensor, mstype.float32)), ())


@_is_finite.register("RowTensor")
def _is_finite_sparse(tensor):
    return _is_finite_dense(tensor.values)


# Looking at each element of a small tensor costs no more than summing it. Of a large one, the sum may tell that all
# elements are finite, but not that one is not.


@_of_one("Bool", "Tensor")
def _first_look(is_small, tensor):
    if is_small:
        return _is_finite_dense(tensor)
    return prim.isfinite(_sum_dense(tensor))


@_first_look.register("Bool", "RowTensor")
def _first_look_sparse(_, tensor):
    return prim.isfinite(_sum_dense(tensor.values))


@_of_one("Bool", "Tensor", "Tensor")
def _second_look(is_small, first, tensor):
    if is_small:
        return first
    return _is_finite_dense(tensor)


@_second_look.register("Bool", "Tensor", "RowTensor")
def _second_look_sparse(_, first, tensor):
    return _is_finite_dense(tensor.values)


@_of_one("Tensor")
def _any_nonzero(tensor):
    return prim.reduce_any(prim.not_equal(tensor, 0.0))


@_of_one("Tensor")
def _flat(tensor):
    tensor = prim.cast(tensor, mstype.float32)
    return tensor if tensor.ndim == 1 else tensor.reshape((-1,))


@_of_one("Tensor", "Tensor")
def _differs(tensor, other):
    if tensor.dtype == mstype.bfloat16:
        return prim.reduce_any(prim.not_equal(prim.cast(tensor, mstype.float32), prim.cast(other, mstype.float32)))
    return prim.reduce_any(prim.not_equal(tensor, other))


@_of_one("Tensor", "Tensor")
def _cast_like(like, tensor):
    return prim.cast(tensor, like.dtype)


@_cast_like.register("Tensor", "RowTensor")
def _cast_like_sparse(like, tensor):
    return RowTensor(tensor.indices, prim.cast(tensor.values, like.dtype), tensor.dense_shape)


@_of_one("Tensor", "Tensor")
def _assign_zeros(after, parameter):
    return prim.assign(parameter, ops.depend(ops.zeros_like(parameter), after))


@_sum_of_squares.register("Tensor")
def _sum_of_squares_tensor(tensor):
    # In float16, squares overflow from 256 on.
    return _sum_dense(prim.square(prim.cast(tensor, mstype.float32)))


@_of_one("Tensor", "Bool", "Tensor")
def _sum_of_squares_where(zero, counts, tensor):
    if counts:
        return _sum_of_squares_tensor(tensor)
    return zero


@_of_one("Tensor", "Tensor", "Tensor")
def _clip(low, high, tensor):
    return prim.minimum(prim.maximum(tensor, low), high)


@_of_one("Tensor", "Tensor", "Tensor")
def _assign_where(condition, parameter, value):
    return prim.assign(parameter, prim.select(condition, value, parameter))


@_of_one("Tensor", "Tensor", "Tensor", "Tensor")
def _average(decay, rest, average, value):
    return prim.assign(average, decay * average + rest * prim.cast(value, mstype.float32))


def packing_of(parameters):
    """
    Returns how `pack` packs the gradients of these parameters. Small ones of one shape and dtype are stacked if there
    are many, since one operator can then replace many.

    The result has the positions of those that stay single, the groups (tuples of positions), and for each gradient its
    place among the single ones followed by the groups.
    """
    return _packing([(parameter.dtype, tuple(parameter.shape)) for parameter in parameters])


def _packing(kinds):
    by_kind = {}
    for i, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(i)
    groups = [tuple(its) for (_, shape), its in by_kind.items() if len(its) >= _SMALLEST_GROUP and is_small(shape)]
    if sum(map(len, groups)) - len(groups) < _LEAST_SAVED:
        groups = []
    stacked = {i for positions in groups for i in positions}
    alone = [i for i in range(len(kinds)) if i not in stacked]
    order = [*alone, *(i for positions in groups for i in positions)]
    return tuple(alone), tuple(groups), tuple(sorted(range(len(order)), key=order.__getitem__))


_constant_packing = ops.constexpr(_packing)


@ops.constexpr
def _are_small(kinds):
    return tuple(is_small(shape) for _, shape in kinds)


def is_small(shape):
    """Returns whether this shape is small: looking at each element costs no more than starting an operator."""
    return 0 <= math.prod(shape) <= _LARGEST_SMALL


def items(tensors, positions):
    """Returns the items of a tuple at these positions."""
    return _map(ops.partial(_pick, tensors), positions)


def pack(tensors, packing):
    """Returns the tensors, with each group of them stacked into one tensor."""
    alone = packing[0]
    groups = packing[1]
    if not groups:
        return tensors
    packed = items(tensors, alone)
    for group in groups:
        packed += (prim.stack(items(tensors, group)),)
    return packed


def unpack(packed, packing):
    """Returns the tensors one by one again."""
    alone, groups, where = packing
    if not groups:
        return packed
    tensors = packed[: len(alone)]
    for i in range(len(groups)):
        tensors += ops.unstack(packed[len(alone) + i])
    return items(tensors, where)


def multiply(tensors, factor):
    """Multiplies each tensor by `factor`, a tensor of shape (), in float32. The tuple may hold tuples."""
    if not isinstance(tensors, (tuple, list)):
        return _multiply(factor, tensors)
    return _map(ops.partial(_multiply, factor), tensors)


# The sum of each tensor, in float32, of shape ().
sums = ops.HyperMap(_sum)


def sum_of_all(tensors):
    """Returns the sum of all elements of a non-empty tuple, in float32, of shape ()."""
    return prim.addn(sums(tensors))


# The dtype and shape of each tensor.
kinds = ops.HyperMap(_kind)


def has_finite_sum(tensors):
    """Returns whether the sum of all elements of a non-empty tuple is finite, as it is unless some are huge or not."""
    return prim.isfinite(sum_of_all(tensors))


def finite(tensors):
    """Returns whether every element of a non-empty tuple is finite, a bool tensor of shape ()."""
    tensors = pack(tensors, _constant_packing(kinds(tensors)))
    return prim.reduce_all(check(tensors, _are_small(kinds(tensors))), ())


def check(tensors, are_small):
    """
    Returns for each tensor whether every element is finite, bool of shape (N,). If all are, one pass is enough.
    `are_small` are what `is_small` says of their shapes.
    """
    first = _map(_first_look, are_small, tensors)
    are_finite = prim.stack(first)
    if all(are_small):
        return are_finite
    # Large finite elements can overflow a sum, too. This happens in skipped steps only.
    if not prim.reduce_all(are_finite, ()):
        are_finite = prim.stack(_map(_second_look, are_small, first, tensors))
    return are_finite


def each_finite(tensors):
    """Returns for each tensor whether every element is finite, bool of shape (N,)."""
    return prim.stack(_map(_is_finite, tensors))


def any_nonzero(tensors):
    """Returns whether any element of a non-empty tuple is not zero, bool of shape ()."""
    return prim.reduce_any(prim.stack(_map(_any_nonzero, tensors)))


def became_not_finite(before, after):
    """Returns whether any element is finite in `before` but not in `after`, bool of shape ()."""
    # In one vector each, since many small operators are slow to compile.
    were_finite = prim.isfinite(prim.concat(_map(_flat, before)))
    are_finite = prim.isfinite(prim.concat(_map(_flat, after)))
    return prim.reduce_any(prim.logical_and(were_finite, prim.logical_not(are_finite)))


def each_differs(tensors, others):
    """Returns for each pair of tensors whether any element differs, a tuple of bools of shape ()."""
    return _map(_differs, tensors, others)


def each_row_finite(stack):
    """Returns for each row of a tensor whether every element is finite, bool of shape (N,)."""
    return prim.reduce_all(prim.isfinite(prim.cast(stack.reshape((stack.shape[0], -1)), mstype.float32)), 1)


def cast_like(tensors, parameters):
    """Casts each tensor to the dtype of its parameter."""
    return _map(_cast_like, parameters, tensors)


@_of_each("Tensor")
def to_float32(tensor):
    """Casts each tensor to float32."""
    return prim.cast(tensor, mstype.float32)


@_of_each("Bool", "Tensor")
def infinite_as_float16(becomes_float16, tensor):
    """Makes elements infinite where a cast to float16 would, in the tensors that a tuple of bools selects."""
    if not becomes_float16:
        return tensor
    rounded = prim.cast(prim.cast(tensor, mstype.float16), mstype.float32)
    # Finite elements are not rounded, so that the norm and clipping are exact.
    return prim.select(prim.isfinite(rounded), tensor, rounded)


# The shape of each item of a tuple, or a word for what is not a tensor. The tuple may hold tuples.
forms = ops.HyperMap(_form)


def never(tensor):
    """
    Returns a bool tensor of shape () that is False, computed from any tensor of shape ().

    It is not a constant: graph mode merges equal constants, and a network's in-place operators then change all of them.
    """
    return prim.less(tensor, tensor)


@_of_each("Tensor")
def copy(parameter):
    """Copies the values of the parameters into new tensors."""
    return prim.deepcopy(parameter)


@_of_each("Tensor", "Tensor")
def assign(parameter, value):
    """Writes each value into its parameter."""
    return prim.assign(parameter, value)


def assign_where(condition, parameters, values):
    """Writes each value into its parameter if `condition`, a bool tensor of shape (), is True."""
    return _map(ops.partial(_assign_where, condition), parameters, values)


def assign_each_where(conditions, parameters, values):
    """Writes each value into its parameter if its own condition is True."""
    return _map(_assign_where, conditions, parameters, values)


@_of_each("Tensor", "Tensor")
def assign_add(parameter, value):
    """Adds each value to its parameter, in place."""
    return prim.assign_add(parameter, value)


def assign_zeros(parameters, after):
    """Sets the parameters to zero once the tensor `after` is computed."""
    return _map(ops.partial(_assign_zeros, after), parameters)


@_of_each("Tensor", "Tensor")
def add(tensor, other):
    """Adds the tensors of two tuples one by one."""
    return tensor + other


def sum_of_squares(tensors):
    """Returns the sum of the squares of all elements of a tuple, float32 of shape ()."""
    return prim.addn(_map(_sum_of_squares, tensors))


def sum_of_squares_where(zero, counts, tensors):
    """Returns the sum of squares of the tensors that `counts`, a tuple of bools, selects; `zero` if it selects none."""
    return prim.addn(_map(ops.partial(_sum_of_squares_where, zero), counts, tensors))


def clip(tensors, low, high):
    """Limits each element to at least `low` and at most `high`."""
    return _map(ops.partial(_clip, low, high), tensors)


def average(decay, rest, averages, values):
    """Sets each average in place to `decay * average + rest * value`."""
    return _map(ops.partial(_average, decay, rest), averages, values)


# Values and flags of a step are of shape () if its networks share them, or (N,) if each has its own. A shared flag that
# is combined with the networks' own ones applies to each network.


def of_network(i, value):
    """Returns the value for network `i`."""
    # Not by an index: graph mode would then warn about every unused unpacked name, and its compiler would crash
    # (segmentation fault) if there are branches as well.
    return ops.unstack(value)[i] if value.ndim > 0 else value


def of_any_network(flag):
    """Returns whether the flag is True for any network, bool of shape ()."""
    return prim.reduce_any(flag) if flag.ndim > 0 else flag


def any_of(flags):
    """Returns whether any flag of a tuple is True."""
    flag = flags[0]
    for each in flags[1:]:
        flag = prim.logical_or(flag, each)
    return flag
