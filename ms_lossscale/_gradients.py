"""Functions over a tensor or a flat tuple of any length, and over the values and flags of several networks."""

import math

from mindspore import dtype as mstype
from mindspore import ops

from ms_lossscale import _primitives as prim

# The most elements of a small tensor: looking at each costs no more than starting an operator.
_LARGEST_SMALL = 2**14

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


def _sum(tensor):
    tensor = prim.cast(tensor, mstype.float32)
    if tensor.ndim > 2:
        # The last axis of a convolution's weight is short, and summing it first would be slow.
        tensor = tensor.reshape((tensor.shape[0], -1))
    if tensor.ndim > 1:
        # On CPU, summing rows first is 4 times faster than all axes at once.
        tensor = prim.reduce_sum(tensor, (-1,))
    return prim.reduce_sum(tensor, ())


def _is_finite(tensor):
    return prim.reduce_all(prim.isfinite(prim.cast(tensor, mstype.float32)), ())


def _square_sum(tensor):
    # In float16, squares overflow from 256 on.
    return _sum(prim.square(prim.cast(tensor, mstype.float32)))


_sum_of_one = _of_one("Tensor")(_sum)
_is_finite_of_one = _of_one("Tensor")(_is_finite)
_square_sum_of_one = _of_one("Tensor")(_square_sum)


@_of_one("Tensor")
def _form(tensor):
    return tensor.shape


@_form.register("Number")
def _form_number(_):
    return "a number"


@_form.register("None")
def _form_none(_):
    return "None"


@_of_one("Tensor")
def _dtype(tensor):
    return tensor.dtype


@_of_one("Tuple", "Number")
def _pick(values, index):
    return values[index]


@_of_one("Tensor", "Tensor")
def _multiply(factor, tensor):
    return prim.mul(prim.cast(tensor, mstype.float32), factor)


# Looking at each element of a small tensor costs no more than summing it. Of a large one, the sum may tell that all
# elements are finite, but not that one is not.


@_of_one("Bool", "Tensor")
def _first_look(is_small, tensor):
    if is_small:
        return _is_finite(tensor)
    return prim.isfinite(_sum(tensor))


@_of_one("Bool", "Tensor", "Tensor")
def _second_look(is_small, first, tensor):
    if is_small:
        return first
    return _is_finite(tensor)


@_of_one("Tensor")
def _is_small(tensor):
    return _small(tensor.shape)


@_of_one("Tensor")
def _any_nonzero(tensor):
    return prim.reduce_any(prim.not_equal(tensor, 0.0))


@_of_one("Tensor")
def _flat(tensor):
    tensor = prim.cast(tensor, mstype.float32)
    return tensor if tensor.ndim == 1 else tensor.reshape((-1,))


@_of_one("Tensor", "Tensor")
def _cast_like(like, tensor):
    return prim.cast(tensor, like.dtype)


@_of_one("Tensor", "Tensor")
def _assign_zeros(after, parameter):
    return prim.assign(parameter, ops.depend(ops.zeros_like(parameter), after))


@_of_one("Tensor", "Bool", "Tensor")
def _square_sum_where(zero, counts, tensor):
    if counts:
        return _square_sum(tensor)
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


def is_small(shape):
    """Returns whether this shape is small: looking at each element costs no more than starting an operator."""
    return 0 <= math.prod(shape) <= _LARGEST_SMALL


_small = ops.constexpr(is_small)


def items(tensors, positions):
    """Returns the items of a tuple at these positions."""
    return _map(ops.partial(_pick, tensors), positions)


def multiply(tensors, factor):
    """Multiplies each tensor by `factor`, a tensor of shape (), in float32. The tuple may hold tuples."""
    if not isinstance(tensors, (tuple, list)):
        return _multiply(factor, tensors)
    return _map(ops.partial(_multiply, factor), tensors)


def multiply_each(tensors, factors):
    """Multiplies each tensor of a tuple by its own factor, a tensor of shape (), in float32."""
    return _map(_multiply, factors, tensors)


# The sum of each tensor, in float32, of shape ().
sums = ops.HyperMap(_sum_of_one)


def sum_of_all(tensors):
    """Returns the sum of all elements of a non-empty tuple, in float32, of shape ()."""
    return prim.addn(sums(tensors))


def has_finite_sum(tensors):
    """Returns whether the sum of all elements of a non-empty tuple is finite, as it is unless some are huge or not."""
    return prim.isfinite(sum_of_all(tensors))


def finite(tensors):
    """Returns whether every element of a non-empty tuple is finite, a bool tensor of shape ()."""
    return prim.reduce_all(check(tensors, _map(_is_small, tensors)), ())


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
    return prim.stack(_map(_is_finite_of_one, tensors))


def any_nonzero(tensors):
    """Returns whether any element of a non-empty tuple is not zero, bool of shape ()."""
    return prim.reduce_any(prim.stack(_map(_any_nonzero, tensors)))


def became_not_finite(before, after):
    """Returns whether any element is finite in `before` but not in `after`, bool of shape ()."""
    # In one vector each, since many small operators are slow to compile.
    were_finite = prim.isfinite(prim.concat(_map(_flat, before)))
    are_finite = prim.isfinite(prim.concat(_map(_flat, after)))
    return prim.reduce_any(prim.logical_and(were_finite, prim.logical_not(are_finite)))


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


# The shape of each item of a tuple, or a word for what is not a tensor; and the dtypes of tensors. The tuples may hold
# tuples.
forms = ops.HyperMap(_form)
dtypes = ops.HyperMap(_dtype)


def never(number):
    """
    Returns a bool tensor that is False, computed from a tensor of numbers, of its shape.

    It is not a constant: graph mode merges equal constants, and a network's in-place operators then change all of them.
    """
    return prim.less(number, number)


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


@_of_each("Tensor", "Tensor")
def assign_add(parameter, value):
    """Adds each value to its parameter, in place."""
    return prim.assign_add(parameter, value)


@_of_each("Tensor", "Tensor")
def assign_or(parameter, flag):
    """Makes each parameter True where its flag is."""
    return prim.assign(parameter, prim.logical_or(parameter, flag))


def assign_zeros(parameters, after):
    """Sets the parameters to zero once the tensor `after` is computed."""
    return _map(ops.partial(_assign_zeros, after), parameters)


def sum_of_squares(tensors):
    """Returns the sum of the squares of all elements of a tuple, float32 of shape ()."""
    return prim.addn(_map(_square_sum_of_one, tensors))


def sum_of_squares_where(zero, counts, tensors):
    """Returns the sum of squares of the tensors that `counts`, a tuple of bools, selects; `zero` if it selects none."""
    return prim.addn(_map(ops.partial(_square_sum_where, zero), counts, tensors))


def clip(tensors, low, high):
    """Limits each element to at least `low` and at most `high`."""
    return _map(ops.partial(_clip, low, high), tensors)


def average(decay, rest, averages, values):
    """Sets each average in place to `decay * average + rest * value`."""
    return _map(ops.partial(_average, decay, rest), averages, values)


# Values and flags of a step are of shape () if its networks share them, or (N,) if each has its own.


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
