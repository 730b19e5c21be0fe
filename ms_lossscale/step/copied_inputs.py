"""Copies of the inputs of a step, which the networks may write to."""

from mindspore import Tensor, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._mindspore.graphs import is_compiling


@gradients.of_one("Tensor")
def _copy_input(tensor):
    return prim.deepcopy(tensor)


@_copy_input.register("Number")
def _copy_number(number):
    return number


@_copy_input.register("String")
def _copy_string(string):
    return string


@_copy_input.register("None")
def _copy_none(none):
    return none


_copy_inputs = ops.HyperMap(_copy_input)


def copy_inputs(inputs):
    """Returns the inputs of a network, with copies of the Tensors among them, also of those in tuples and lists."""
    return _copy_inputs(inputs) if is_compiling() else _copied_in_python(inputs)


def _copied_in_python(value):
    if isinstance(value, Tensor):
        return prim.deepcopy(value)
    if type(value) in (tuple, list):
        return type(value)(map(_copied_in_python, value))
    if type(value) is dict:
        return {key: _copied_in_python(item) for key, item in value.items()}
    return value
