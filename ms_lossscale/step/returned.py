"""
What a network returned: its losses and aux, or an error that says what it returned. That may be tensors, numbers and
None in tuples, lists and dicts of any depth.
"""

import ast

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _primitives as prim


def loss_of(owner, number, output, may_return_tuple):
    """Returns the loss, of any shape, of a network without aux."""
    if may_return_tuple and isinstance(output, tuple) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Tensor):
        _not_one_loss(owner, number, described(output))
    return output


def loss_and_aux_of(owner, number, output):
    """Returns the loss, of any shape, and the tuple of aux."""
    if not isinstance(output, tuple) or len(output) == 0 or not isinstance(output[0], Tensor):
        _no_aux(owner, number, described(output))
    return output[0], output[1:]


def without_weight(owner, number, output, has_aux):
    """
    Returns what a weighted network returned, without the weight, and the weight, float32 of shape (), which is not
    trained.
    """
    fits = isinstance(output, tuple) and (len(output) == 2 or (has_aux and len(output) > 2))
    if not fits or not isinstance(output[0], Tensor):
        _no_weight(owner, number, has_aux, described(output))
    if has_aux:
        return (output[0], *output[2:]), as_weight(owner, output[1])
    return output[0], as_weight(owner, output[1])


def as_weight(owner, weight):
    """Returns a weight, a number or a Tensor of one element, as a float32 Tensor of shape () that is not trained."""
    if isinstance(weight, Tensor) and weight.size == 1:
        weight = ops.stop_gradient(weight.astype(mstype.float32).reshape(()))
    elif isinstance(weight, (int, float)) and not isinstance(weight, bool):
        weight = ops.ScalarToTensor()(weight, mstype.float32)
    else:
        _not_a_weight(owner, described(weight))
    return weight


def mean_of(loss, weight):
    """Returns the loss, a sum, divided by its weight, in float32; the loss itself where the weight is 0."""
    loss = loss.astype(mstype.float32)
    return loss / prim.select(prim.equal(weight, ops.zeros_like(weight)), ops.ones_like(weight), weight)


def check_losses(owner, losses, has_aux, output):
    """Returns the losses of a network for several optimizers. Raises unless there are so many; more needs `has_aux`."""
    output = loss_first(owner, 0, output)
    fits = isinstance(output, tuple) and (len(output) == losses or (has_aux and len(output) > losses))
    if not fits:
        _not_the_losses(owner, losses, has_aux, described(output))
    for loss in output[:losses]:
        if not isinstance(loss, Tensor):
            _not_the_losses(owner, losses, has_aux, described(output))
    return output[:losses]


def loss_first(owner, number, output):
    """
    Returns what a network returned. Raises if an image seems to come before its loss, since the image would be trained.
    """
    if isinstance(output, (tuple, list)) and len(output) > 1 and isinstance(output[0], Tensor):
        later = ()
        for each in output[1:]:
            if isinstance(each, Tensor):
                later += (each.shape if each.dtype != mstype.bool_ else None,)
            else:
                later += (() if isinstance(each, (int, float)) and not isinstance(each, bool) else None,)
        if _is_image_before_loss(output[0].shape, later):
            _image_first(owner, number, described(output))
    # Returned, since graph mode may drop a call that returns nothing, and warns.
    return output


# Graph mode runs functions of constants when it compiles, and passes on the exceptions that they raise. With
# `set_inputs`, a shape or a length that varies is None.


def _looks_like_image_before_loss(first, later):
    if first is None or sum(length != 1 for length in first) < 2:
        return False
    return any(shape is not None and all(length == 1 for length in shape) for shape in later)


_is_image_before_loss = ops.constexpr(_looks_like_image_before_loss, check=False)


@ops.constexpr
def _image_first(owner, number, returned):
    raise ValueError(
        f"For '{owner}', network {number} must return its loss first, which is what is trained, but it returned "
        f"{returned}: with a single number after a Tensor of several axes, an image and its loss, say. Wrap it in a "
        f"Cell that returns the loss alone, or, with has_aux=True, (loss, *aux). If the first is a loss for each of "
        f"many elements, return its sum."
    )


@ops.constexpr
def _not_one_loss(owner, number, returned):
    raise TypeError(
        f"For '{owner}', network {number} must return one Tensor, the loss, but it returned {returned}. For several "
        f"losses, wrap it in a Cell that returns their sum. A network that returns (loss, *aux) needs has_aux=True, "
        f"which trains only the first."
    )


@ops.constexpr
def _no_weight(owner, number, has_aux, returned):
    what = "(loss, weight, *aux)" if has_aux else "(loss, weight)"
    raise TypeError(
        f"For '{owner}' with weighted=True, network {number} must return a tuple {what}: the loss, a Tensor, which is "
        f"a sum, and the number of things that it is a sum over, a number or a Tensor of shape (), but it returned "
        f"{returned}. For tokens: return (losses * mask).sum(), mask.sum()."
    )


@ops.constexpr
def _not_a_weight(owner, given):
    raise TypeError(f"For '{owner}', a weight must be a number or a Tensor of shape (), but it is {given}.")


@ops.constexpr
def _no_aux(owner, number, returned):
    raise TypeError(
        f"For '{owner}' with has_aux=True, network {number} must return a tuple (loss, *aux) with the loss, a Tensor, "
        f"first, but it returned {returned}. Without aux, has_aux is False; of several networks it may be a list."
    )


@ops.constexpr
def _not_the_losses(owner, losses, has_aux, returned):
    raise TypeError(
        f"For '{owner}', one network for {losses} optimizers must return a tuple of {losses} losses, each a Tensor"
        f"{', and then aux' if has_aux else ''}, but network 0 returned {returned}. Return one loss for each "
        f"optimizer, or pass a list of networks{'' if has_aux else '; further values need has_aux=True'}."
    )


def of_each_tensor(function, leaves):
    """Returns the same flat tuple, with each tensor in it replaced by `function` of it."""
    values = ()
    for leaf in leaves:
        values += (function(leaf) if isinstance(leaf, Tensor) else leaf,)
    return values


def leaves_in(value):
    """Returns, in order, all that is not a tuple, list, dict or None, as one flat tuple."""
    if value is None:
        return ()
    leaves = ()
    if isinstance(value, dict):
        # By keys and values, here and below: with two dicts, graph mode mixes up what is taken from them by name.
        leaves = leaves_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            leaves += leaves_in(each)
    else:
        leaves = (value,)
    return leaves


def tensors_in(value):
    """Returns the tensors in it, in order, as one flat tuple."""
    tensors = ()
    for leaf in leaves_in(value):
        if isinstance(leaf, Tensor):
            tensors += (leaf,)
    return tensors


def with_tensors(value, tensors):
    """Returns the value with other tensors in it."""
    leaves, i = (), 0
    for leaf in leaves_in(value):
        if isinstance(leaf, Tensor):
            leaves += (tensors[i],)
            i += 1
        else:
            leaves += (leaf,)
    return in_form(form_of(value), leaves)


def form_of(value):
    """Returns the form of a value without its leaves, as a string: graph mode keeps that as a constant."""
    return _as_text(_tokens(value))


def in_form(form, leaves):
    """Returns the value of this form with these leaves."""
    return _read(_parsed(form), 0, leaves, 0)[0]


def described(value):
    """Returns the value for a message, with shapes instead of its tensors."""
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
    """Returns the value that begins at a token, where the next one begins, and how many leaves are used by then."""
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
    while len(values) < length:  # A loop over a range would have a variable that nothing uses.
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
    Makes a dict of names and as many values.

    It is graph mode's own operator: in a process that has compiled much, graph mode sometimes can't compile a loop over
    the names, with "The pointer[input_i_value] is null".
    """

    def __init__(self):
        super().__init__("make_dict")

    def __call__(self, names, values):
        return dict(zip(names, values))


_dict_of = _DictOf()


class _Text:
    """Stands for a tensor when a value is shown."""

    def __init__(self, text):
        self._text = text

    def __repr__(self):
        return self._text


def _of_leaf(kind, value):
    if kind == "Tensor":
        # With `set_inputs`, a shape or a length that varies is None in graph mode.
        return _Text("Tensor of any shape" if value is None else f"Tensor of shape {value}")
    return value


def _shown(tokens, leaves):
    return repr(_read(tokens, 0, [_of_leaf(*leaf) for leaf in leaves], 0)[0])


_described = ops.constexpr(_shown, check=False)
