"""Functions over a tensor or a (flat) tuple of them, for tuples of any length and for sparse gradients (RowTensor)."""

import math

from mindspore import RowTensor, ops
from mindspore import dtype as mstype

# Up to so many elements a tensor is small, and from so many on small tensors of one shape are worked on together.
_LARGEST_SMALL, _SMALLEST_GROUP = 2**14, 4

# Primitives and not functions or methods, each of which graph mode parses, with all that it calls; for the same reason
# axes are tuples.
_to, _times, _logical_and = ops.Cast(), ops.Mul(), ops.LogicalAnd()
_stack, _are_finite = ops.Stack(), ops.IsFinite()
_reduce_sum, _reduce_all = ops.ReduceSum(), ops.ReduceAll()

# HyperMap and not a list comprehension: a comprehension's call depth grows with the tuple, and graph mode limits it.
_map = ops.HyperMap()


def _of_one(*types):
    """Makes of a function of single tensors, or of numbers, what `_map` takes; for these types of its arguments."""

    def registered(function):
        of_one = ops.MultitypeFuncGraph(function.__name__)
        of_one.register(*types)(function)
        return of_one

    return registered


def _of_each(*types):
    """Makes of a function of single tensors one of tuples of them, or of tuples of tuples."""
    return lambda function: ops.HyperMap(_of_one(*types)(function))


_sum = ops.MultitypeFuncGraph("sum")
_is_finite = ops.MultitypeFuncGraph("is_finite")
_sum_of_squares = ops.MultitypeFuncGraph("sum_of_squares")


@_of_one("Tensor")
def _kind(tensor):
    return (tensor.dtype, tensor.shape)


@_kind.register("RowTensor")
def _kind_sparse(_):
    # Never small.
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
    return _times(_to(tensor, mstype.float32), factor)


@_multiply.register("Tensor", "RowTensor")
def _multiply_sparse(factor, tensor):
    return RowTensor(tensor.indices, _times(_to(tensor.values, mstype.float32), factor), tensor.dense_shape)


@_sum.register("Tensor")
def _sum_dense(tensor):
    tensor = _to(tensor, mstype.float32)
    if tensor.ndim > 2:
        # The last axis of a convolution's weight is so short that summing it first is slow.
        tensor = tensor.reshape((tensor.shape[0], -1))
    if tensor.ndim > 1:
        # On CPU summing rows first is 4 times faster than all axes at once.
        tensor = _reduce_sum(tensor, (-1,))
    return _reduce_sum(tensor, ())


@_sum.register("RowTensor")
def _sum_sparse(tensor):
    return _sum_dense(tensor.values)


@_is_finite.register("Tensor")
def _is_finite_dense(tensor):
    return _reduce_all(_are_finite(_to(tensor, mstype.float32)), ())


@_is_finite.register("RowTensor")
def _is_finite_sparse(tensor):
    return _is_finite_dense(tensor.values)


@_of_one("Tensor", "Tensor")
def _became_not_finite(before, after):
    was, is_now = ops.isfinite(before.astype(mstype.float32)), ops.isfinite(after.astype(mstype.float32))
    return ops.ReduceAny()(ops.logical_and(was, ops.logical_not(is_now)))


@_of_one("Tensor", "Tensor")
def _cast_like(like, tensor):
    return tensor.astype(like.dtype)


@_cast_like.register("Tensor", "RowTensor")
def _cast_like_sparse(like, tensor):
    return RowTensor(tensor.indices, tensor.values.astype(like.dtype), tensor.dense_shape)


@_of_one("Tensor", "Tensor", "Tensor")
def _assign_where(condition, parameter, value):
    return ops.assign(parameter, ops.select(condition, value, parameter))


@_of_one("Tensor", "Tensor")
def _assign_zeros(after, parameter):
    return ops.assign(parameter, ops.depend(ops.zeros_like(parameter), after))


@_sum_of_squares.register("Tensor")
def _sum_of_squares_tensor(tensor):
    # Squares of float16 overflow from 256 on.
    return _sum_dense(ops.square(tensor.astype(mstype.float32)))


@_of_one("Tensor", "Bool", "Tensor")
def _sum_of_squares_where(zero, counts, tensor):
    if counts:
        return _sum_of_squares_tensor(tensor)
    return zero


@_of_one("Tensor", "Tensor", "Tensor")
def _clip(low, high, tensor):
    return ops.minimum(ops.maximum(tensor, low), high)


@_of_one("Tensor", "Tensor", "Tensor", "Tensor")
def _average(decay, rest, average, value):
    return ops.assign(average, decay * average + rest * value.astype(mstype.float32))


def packing_of(parameters):
    """
    How `pack` packs the gradients of these parameters: those that are small and many of one shape and dtype in groups,
    since one operator can do the work of one each.

    Returns the positions of those that stay alone, the groups (tuples of positions), and for each gradient its place
    among those that stay alone, followed by the groups'.
    """
    return _packing([(parameter.dtype, tuple(parameter.shape)) for parameter in parameters])


def _packing(kinds):
    by_kind = {}
    for i, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(i)
    alone, groups = [], []
    for (_, shape), positions in by_kind.items():
        if len(positions) >= _SMALLEST_GROUP and is_small(shape):
            groups.append(tuple(positions))
        else:
            alone += positions
    order = [*alone, *(i for positions in groups for i in positions)]
    return tuple(alone), tuple(groups), tuple(sorted(range(len(order)), key=order.__getitem__))


_constant_packing = ops.constexpr(_packing)


@ops.constexpr
def _by_size(kinds):
    """The positions of the large tensors, and of the small ones."""
    large, small = [], []
    for i, (_, shape) in enumerate(kinds):
        (small if is_small(shape) else large).append(i)
    return tuple(large), tuple(small)


def is_small(shape):
    """Whether a tensor of this shape is small: looking at each element costs no more than starting an operator."""
    return 0 <= math.prod(shape) <= _LARGEST_SMALL


def items(tensors, positions):
    """Those of a tuple at these positions."""
    return _map(ops.partial(_pick, tensors), positions)


def pack(tensors, packing):
    """The tensors, each group of them stacked as one tensor."""
    alone, groups, _ = packing
    if not groups:
        return tensors
    packed = items(tensors, alone)
    for group in groups:
        packed += (ops.stack(items(tensors, group)),)
    return packed


def unpack(packed, packing):
    """The tensors one by one again."""
    alone, groups, where = packing
    if not groups:
        return packed
    tensors = packed[: len(alone)]
    for i in range(len(groups)):
        tensors += ops.unstack(packed[len(alone) + i])
    return items(tensors, where)


def multiply(tensors, factor):
    """Each tensor times `factor`, a tensor of shape (), in float32; the tuple may hold tuples."""
    if not isinstance(tensors, (tuple, list)):
        return _multiply(factor, tensors)
    return _map(ops.partial(_multiply, factor), tensors)


# The sum of each tensor, in float32, of shape ().
sums = ops.HyperMap(_sum)


# For each tensor its dtype and shape.
kinds = ops.HyperMap(_kind)


def finite(tensors):
    """Whether every element of a non-empty tuple is finite, a bool tensor of shape ()."""
    tensors = pack(tensors, _constant_packing(kinds(tensors)))
    large, small = _by_size(kinds(tensors))
    if not small:
        return _reduce_all(check_large(items(tensors, large)), ())
    small_are_finite = _reduce_all(each_finite(items(tensors, small)), ())
    if not large:
        return small_are_finite
    return _logical_and(_reduce_all(check_large(items(tensors, large)), ()), small_are_finite)


def check_large(tensors):
    """For each tensor whether every element is finite, bool of shape (N,): one cheap pass if all are."""
    # A sum is not finite whenever an element is not. The reverse does not hold, since large finite values can overflow
    # the sum, so a suspicion is looked into, which happens in skipped steps only.
    are_finite = _are_finite(_stack(sums(tensors)))
    if not _reduce_all(are_finite, ()):
        are_finite = each_finite(tensors)
    return are_finite


def each_finite(tensors):
    """For each tensor whether every element is finite, bool of shape (N,)."""
    return _stack(_map(_is_finite, tensors))


def became_not_finite(before, after):
    """Whether any element of `after` is not finite that was finite in `before`, bool of shape ()."""
    return ops.ReduceAny()(ops.stack(_map(_became_not_finite, before, after)))


def each_row_finite(stack):
    """For each row of a tensor whether every element is finite, bool of shape (N,)."""
    return ops.ReduceAll()(ops.isfinite(stack.reshape((stack.shape[0], -1)).astype(mstype.float32)), 1)


def cast_like(tensors, parameters):
    """Each tensor in the dtype of its parameter."""
    return _map(_cast_like, parameters, tensors)


@_of_each("Tensor")
def to_float32(tensor):
    """Each tensor in float32."""
    return _to(tensor, mstype.float32)


@_of_each("Bool", "Tensor")
def infinite_as_float16(becomes_float16, tensor):
    """The tensors; those for which a tuple of bools says so are infinite where a cast to float16 makes them so."""
    if not becomes_float16:
        return tensor
    rounded = _to(_to(tensor, mstype.float16), mstype.float32)
    # Where it is finite the gradient stays as it is, for its norm and for what is clipped.
    return ops.select(_are_finite(rounded), tensor, rounded)


# For each item of a tuple its shape, or the word for what is no tensor; the tuple may hold tuples.
forms = ops.HyperMap(_form)


def never(tensor):
    """
    A bool tensor of shape () that is False, made of any tensor of shape ().

    A constant would not do: graph mode merges equal constants, and a network's in-place operators then change all.
    """
    return ops.less(tensor, tensor)


@_of_each("Tensor")
def copy(parameter):
    """The values of the parameters as tensors of their own."""
    return ops.deepcopy(parameter)


@_of_each("Tensor", "Tensor")
def assign(parameter, value):
    """Writes each value into its parameter."""
    return ops.assign(parameter, value)


def assign_where(condition, parameters, values):
    """Writes each value into its parameter, if `condition`, a bool tensor of shape (), says so."""
    return _map(ops.partial(_assign_where, condition), parameters, values)


@_of_each("Tensor", "Tensor")
def assign_add(parameter, value):
    """Adds each value to its parameter, in place."""
    return ops.assign_add(parameter, value)


def assign_zeros(parameters, after):
    """Zeroes the parameters, once the tensor `after` has been computed."""
    return _map(ops.partial(_assign_zeros, after), parameters)


@_of_each("Tensor", "Tensor")
def add(tensor, other):
    """Each tensor plus its other."""
    return tensor + other


def sum_of_squares(tensors):
    """The sum of the squares of all elements of a tuple, float32 of shape ()."""
    return ops.addn(_map(_sum_of_squares, tensors))


def sum_of_squares_where(zero, counts, tensors):
    """The sum of the squares of those tensors for which `counts`, a tuple of bools, says so; `zero` is that of none."""
    return ops.addn(_map(ops.partial(_sum_of_squares_where, zero), counts, tensors))


def clip(tensors, low, high):
    """Each element, but at least `low` and at most `high`."""
    return _map(ops.partial(_clip, low, high), tensors)


def average(decay, rest, averages, values):
    """Moves each average in place to `decay * average + rest * value`."""
    return _map(ops.partial(_average, decay, rest), averages, values)


# Values and flags of a step that its networks share, of shape (), or of which each has its own, of shape (N,). A flag
# of all may be joined with those of each: then it holds of each.


def of_network(i, value):
    """What network `i` has of it."""
    # Not by an index: graph mode then warns of all that is unpacked anywhere and not used, and its compiler crashes
    # (segmentation fault) where there are branches, too.
    return ops.unstack(value)[i] if value.ndim else value


def of_any_network(flag):
    """Whether it holds of any network, bool of shape ()."""
    return ops.ReduceAny()(flag) if flag.ndim else flag


def any_of(flags):
    """Whether any of a tuple holds."""
    flag = flags[0]
    for each in flags[1:]:
        flag = ops.logical_or(flag, each)
    return flag
