"""Whatever a network returns: tensors in tuples, lists and dicts of any depth."""

from mindspore import Tensor


def of_each_tensor(function, value):
    """The same tuple, list or dict, of any depth, with `function` of each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        values = {}
        for name in value:
            values[name] = of_each_tensor(function, value[name])
        return values
    if not isinstance(value, (tuple, list)):
        return value
    values = ()
    for each in value:
        values += (of_each_tensor(function, each),)
    return list(values) if isinstance(value, list) else values


def tensors_in(value):
    """The tensors in it, in order, as one flat tuple."""
    if isinstance(value, Tensor):
        return (value,)
    tensors = ()
    if isinstance(value, dict):
        for name in value:
            tensors += tensors_in(value[name])
    elif isinstance(value, (tuple, list)):
        for each in value:
            tensors += tensors_in(each)
    return tensors


def with_tensors(value, tensors):
    """The same form with other tensors in it."""
    return _filled(value, tensors, 0)[0]


def _filled(value, tensors, i):
    if isinstance(value, Tensor):
        return tensors[i], i + 1
    if isinstance(value, dict):
        filled = {}
        for name in value:
            filled[name], i = _filled(value[name], tensors, i)
        return filled, i
    if not isinstance(value, (tuple, list)):
        return value, i
    items = ()
    for each in value:
        item, i = _filled(each, tensors, i)
        items += (item,)
    return list(items) if isinstance(value, list) else items, i
