"""Whatever a network returns: tensors, numbers and None in tuples, lists and dicts of any depth."""

import ast

from mindspore import Tensor, ops


def of_each_tensor(function, leaves):
    """The same flat tuple, with `function` of each tensor in it."""
    values = ()
    for leaf in leaves:
        values += (function(leaf) if isinstance(leaf, Tensor) else leaf,)
    return values


def leaves_in(value):
    """All in it that is no tuple, list, dict or None, in order, as one flat tuple."""
    if value is None:
        return ()
    leaves = ()
    if isinstance(value, dict):
        # Of keys and values, here and below: with two dicts graph mode confuses what is taken from them by name.
        leaves = leaves_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            leaves += leaves_in(each)
    else:
        leaves = (value,)
    return leaves


def tensors_in(value):
    """The tensors in it, in order, as one flat tuple."""
    tensors = ()
    for leaf in leaves_in(value):
        if isinstance(leaf, Tensor):
            tensors += (leaf,)
    return tensors


def with_tensors(value, tensors):
    """The same form with other tensors in it."""
    leaves, i = (), 0
    for leaf in leaves_in(value):
        if isinstance(leaf, Tensor):
            leaves += (tensors[i],)
            i += 1
        else:
            leaves += (leaf,)
    return in_form(form_of(value), leaves)


def form_of(value):
    """What is left of it without its leaves: a string, which graph mode hands on as the constant that it is."""
    return _as_text(_tokens(value))


def in_form(form, leaves):
    """The value of this form with these leaves."""
    return _read(_parsed(form), 0, leaves, 0)[0]


def described(value):
    """The value with shapes in the place of its tensors, for a message."""
    leaves = ()
    for leaf in leaves_in(value):
        leaves += (("Tensor", leaf.shape) if isinstance(leaf, Tensor) else ("", leaf),)
    return _described(_tokens(value), leaves)


def _tokens(value):
    # Flat, since graph mode knows no constants of more than six levels.
    if value is None:
        return ("None",)
    if isinstance(value, dict):
        return ("dict", len(value), *tuple(value.keys()), *_tokens(tuple(value.values())))
    if not isinstance(value, (tuple, list)):
        return ("leaf",)
    tokens = ("list" if isinstance(value, list) else "tuple", len(value))
    for each in value:
        tokens += _tokens(each)
    return tokens


def _read(tokens, at, leaves, i):
    """The value that begins at a token, where the next one begins, and how many leaves are taken by then."""
    kind = tokens[at]
    if kind == "None":
        return None, at + 1, i
    if kind == "leaf":
        return leaves[i], at + 1, i + 1
    length = tokens[at + 1]
    at += 2
    if kind == "dict":
        values, end, i = _read(tokens, at + length, leaves, i)
        return _dict_of(tokens[at : at + length], values), end, i
    values = ()
    for _ in range(length):
        value, at, i = _read(tokens, at, leaves, i)
        values += (value,)
    return (list(values) if kind == "list" else values), at, i


@ops.constexpr
def _as_text(tokens):
    return repr(tokens)


@ops.constexpr
def _parsed(text):
    return ast.literal_eval(text)


class _DictOf(ops.Primitive):
    """
    The dict of some names and as many values.

    Graph mode's own operator, since a process that has compiled much fails at times to compile a loop over the names,
    with "The pointer[input_i_value] is null".
    """

    def __init__(self):
        super().__init__("make_dict")

    def __call__(self, names, values):
        return dict(zip(names, values))


_dict_of = _DictOf()


class _Text:
    """Stands for a tensor where a value is shown."""

    def __init__(self, text):
        self._text = text

    def __repr__(self):
        return self._text


def _of_leaf(kind, value):
    if kind == "Tensor":
        # With `set_inputs`, graph mode knows None in the place of the shape, or of a length.
        return _Text("Tensor of any shape" if value is None else f"Tensor of shape {value}")
    return value


def _shown(tokens, leaves):
    return repr(_read(tokens, 0, [_of_leaf(*leaf) for leaf in leaves], 0)[0])


_described = ops.constexpr(_shown, check=False)
