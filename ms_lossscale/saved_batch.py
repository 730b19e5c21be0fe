"""The inputs of a call in an .npz file: arrays, and the tuples, lists, dicts, numbers, strings and None around them."""

import json

import numpy as np
from mindspore import Tensor

from ms_lossscale._values import as_array

_STRUCTURE = "structure"


def save_batch(path, inputs):
    """Saves the inputs of a call. Returns whether the file holds nothing but an array for each."""
    arrays = []
    structure = _structure(inputs if isinstance(inputs, (tuple, list)) else (inputs,), arrays)
    file_of = {f"input_{i}": array for i, array in enumerate(arrays)}
    (items,) = structure.values()
    are_arrays = items == [{"array": name} for name in file_of]
    if not are_arrays:
        file_of[_STRUCTURE] = np.asarray(json.dumps(structure))
    with open(path, "wb") as file:
        np.savez(file, **file_of)
    return are_arrays


def load_batch(path):
    """Returns what was saved, with NumPy's arrays in the place of Tensors."""
    with np.load(path) as arrays:
        if _STRUCTURE not in arrays:
            return tuple(arrays.values())
        return _filled(json.loads(str(arrays[_STRUCTURE])), arrays)


def _structure(value, arrays):
    """Returns what JSON can write of a value, and appends the arrays in it."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        array = as_array(value) if isinstance(value, Tensor) else np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError("An array of Python objects can't be saved.")
        arrays.append(array)
        return {"array": f"input_{len(arrays) - 1}"}
    if isinstance(value, (tuple, list)):
        return {"list" if isinstance(value, list) else "tuple": [_structure(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _structure(item, arrays)] for key, item in value.items()]}
    return value


def _filled(structure, arrays):
    if not isinstance(structure, dict):
        return structure
    ((kind, value),) = structure.items()
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {key: _filled(item, arrays) for key, item in value}
    items = [_filled(item, arrays) for item in value]
    return items if kind == "list" else tuple(items)
