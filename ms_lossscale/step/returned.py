"""What the networks of a step take and return, or an error that says what they must."""

import numbers

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import describe


def check_network_inputs(owner, network_inputs, networks):
    """Raises unless `network_inputs` is None or gives positions for each network. Returns it as a tuple of tuples."""
    if network_inputs is None:
        return None
    what = f"For '{owner}', the argument 'network_inputs' must be None or a list with a tuple of positions for each"
    if not isinstance(network_inputs, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in network_inputs):
        raise TypeError(f"{what} network, [(0, 1), (1,)] say, but got {describe(network_inputs)}.")
    if len(network_inputs) != len(networks):
        raise ValueError(f"{what} of the {len(networks)} networks, but got {len(network_inputs)}: {network_inputs!r}.")
    for position in (position for positions in network_inputs for position in positions):
        if not isinstance(position, numbers.Integral) or isinstance(position, bool):
            raise TypeError(f"{what} network, integers >= 0, but got {describe(position)}.")
        if position < 0:
            raise ValueError(f"{what} network, integers >= 0 counted from the first input, but got {position}.")
    return tuple(tuple(int(position) for position in positions) for positions in network_inputs)


def returned_values(owner, number, output, fixed, has_aux, may_be_tuple, weighted):
    """
    Returns what a network returned as a tuple: `fixed` values, of which the second is a weight if it is `weighted`, and
    with `has_aux` more of them, Tensors. Raises for anything else.
    """
    values = output if isinstance(output, tuple) else (output,)
    if len(values) > 1 and (fixed == 1 or weighted):
        values = loss_first(owner, number, values)
    fits = len(values) == fixed or (has_aux and len(values) > fixed)
    fits = fits and (may_be_tuple or not isinstance(output, tuple)) and (isinstance(output, tuple) or not has_aux)
    for i in range(len(values)):  # Graph mode would parse ten functions for `enumerate`.
        fits = fits and (isinstance(values[i], Tensor) or (weighted and i == 1))
    if not fits:
        _refuse(owner, number, fixed, has_aux, weighted, _forms(values))
    return values


def as_weight(owner, weight):
    """Returns a weight, a number or a Tensor of one element, as a float32 Tensor of shape () that is not trained."""
    if isinstance(weight, Tensor) and weight.size == 1:
        weight = ops.stop_gradient(weight.astype(mstype.float32).reshape(()))
    elif isinstance(weight, (int, float)) and not isinstance(weight, bool):
        weight = ops.ScalarToTensor()(_possible_weight(owner, weight), mstype.float32)
    else:
        _not_a_weight(owner)
    return weight


def mean_of(loss, weight):
    """Returns the loss, a sum, divided by its weight, in float32; the loss itself where the weight is 0."""
    loss = prim.cast(loss, mstype.float32)
    return prim.div(loss, prim.select(prim.equal(weight, ops.zeros_like(weight)), ops.ones_like(weight), weight))


def loss_first(owner, number, values):
    """Returns what a network returned. Raises if an image seems to come before its loss: the image would be trained."""
    if isinstance(values[0], Tensor) and values[0].ndim > 1 and values[0].size > max(values[0].shape):
        for each in values[1:]:
            if isinstance(each, Tensor) and each.dtype != mstype.bool_ and each.size == 1:
                _image_first(owner, number, _forms(values))
    # Returned, since graph mode may drop a call that returns nothing, and warns.
    return values


def _forms(values):
    forms = ()
    for each in values:
        forms += gradients.forms((each,)) if isinstance(each, Tensor) else (None,)
    return forms


# Graph mode runs functions of constants when it compiles, and passes on the exceptions that they raise.


def _listed(forms):
    return ", ".join("no Tensor" if form is None else f"a Tensor of shape {tuple(form)}" for form in forms)


@ops.constexpr
def _image_first(owner, number, forms):
    raise ValueError(
        f"For '{owner}', network {number} must return its loss first, which is what is trained, but it returned "
        f"{_listed(forms)}: an image and its loss, say. Return (loss, *aux) with "
        f"has_aux=True, or the loss alone; of many losses, one for each element, their sum."
    )


@ops.constexpr
def _refuse(owner, number, fixed, has_aux, weighted, forms):
    losses = fixed - weighted
    names = ["loss"] if losses == 1 else [f"loss_{i}" for i in range(losses)]
    names += ["weight"] * weighted + ["*aux"] * has_aux
    must = f"a tuple ({', '.join(names)})" if len(names) > 1 else "one Tensor, the loss"
    raise TypeError(
        f"For '{owner}', network {number} must return {must}, of which only the loss is trained, but it returned "
        f"{_listed(forms)}. More than that needs has_aux=True, and aux must be Tensors, in "
        f"no list or dict; a loss that is a sum needs weighted=True."
    )


@ops.constexpr
def _not_a_weight(owner):
    raise TypeError(f"For '{owner}', a weight must be a number or a Tensor of shape ().")


@ops.constexpr
def _possible_weight(owner, weight):
    if not 0 <= weight < float("inf"):
        raise ValueError(f"For '{owner}', a weight must be a finite number >= 0, but got {weight}.")
    return float(weight)
