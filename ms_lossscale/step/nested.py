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


def built_like(template, value):
    """
    The value, of the lengths that `template`, which has the same form, is known to have.

    Graph mode forgets the length of a tuple of equal tensors that goes through a `while`.
    """
    if isinstance(template, Tensor):
        return value
    if isinstance(template, dict):
        values = {}
        for name in template:
            values[name] = built_like(template[name], value[name])
        return values
    if not isinstance(template, (tuple, list)):
        return template
    values = ()
    for i in range(len(template)):
        values += (built_like(template[i], value[i]),)
    return list(values) if isinstance(template, list) else values
