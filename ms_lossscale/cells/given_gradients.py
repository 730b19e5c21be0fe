"""What the end of a ManualStep is given: a tuple of gradients for each optimizer, a loss, a weight."""

from mindspore import Tensor, ops

from ms_lossscale._arguments import describe
from ms_lossscale.cells.rank_comparison import check_weight


def expected_gradients(weights_of_each):
    """Returns for each optimizer the names and shapes of its weights."""
    return tuple(tuple((weight.name, tuple(weight.shape)) for weight in its) for its in weights_of_each)


def check_number(owner, expected, count):
    """Raises unless there are as many arguments as optimizers."""
    if count != len(expected):
        number = "optimizer, one tuple" if len(expected) == 1 else f"of the {len(expected)} optimizers"
        raise ValueError(
            f"For '{owner}', there must be a tuple of gradients for each {number}, but got {count} arguments. Pass "
            f"end(grads) for one optimizer, end(grads_0, grads_1) for two, each in the order of its 'parameters'."
        )


def check_shapes(owner, expected, several, shapes):
    """
    Raises unless there is a gradient of its shape for each weight. `shapes` has what was passed for each optimizer: a
    tuple with a shape for each gradient. If there is only one optimizer, `several` tells whether it was in a list.
    """
    check_number(owner, expected, len(shapes))
    for i, (its_shapes, its_expected) in enumerate(zip(shapes, expected)):
        of_optimizer = f" of optimizer {i}" if several else ""
        if not all(isinstance(shape, tuple) for shape in its_shapes):
            raise TypeError(
                f"For '{owner}', the gradients{of_optimizer} must be a tuple of Tensors, one for each weight, but got "
                f"{its_shapes}."
            )
        if len(its_shapes) != len(its_expected):
            raise ValueError(
                f"For '{owner}', there must be a gradient for each of the {len(its_expected)} weights{of_optimizer}, "
                f"but got {len(its_shapes)}. Differentiate by the 'parameters' of this step."
            )
        for shape, (name, expected_shape) in zip(its_shapes, its_expected):
            # In compiled code a length may not be known.
            if shape != expected_shape and all(length >= 0 for length in shape):
                raise ValueError(
                    f"For '{owner}', the gradient of '{name}' must have the shape {expected_shape}, but got {shape}. "
                    f"Pass the gradients in the order of the step's 'parameters'."
                )


def what_needs_loss(conditions, loss_scales):
    """Returns the names of what looks at the loss of a step."""
    names = [type(condition).__name__ for condition in conditions if condition.needs_loss]
    if not all(its.backoff_if_loss_not_finite for its in loss_scales):
        names.append("backoff_if_loss_not_finite=False")
    return tuple(names)


def check_loss(owner, names, is_missing):
    """Raises if no loss was passed, although what has these names looks at it."""
    if is_missing and names:
        raise ValueError(
            f"For '{owner}', the argument 'loss' must be given for {' and '.join(names)}, but got None. Pass the "
            f"unscaled loss: end(grads, loss=loss)."
        )


def check_is_weighted(owner, were_weighted, is_weighted):
    """Raises if some calls of a ManualStep have a weight, and others have none."""
    if were_weighted != is_weighted:
        has, had = ("a", "none") if is_weighted else ("no", "one")
        raise ValueError(
            f"For '{owner}', all calls must have a 'weight', or none, but this one has {has} weight, and those before "
            f"had {had}. Pass one in each call, where the gradients are those of a sum: end(grads, weight=count)."
        )


@ops.constexpr
def fit_compiled(expected, shapes, names, has_loss, has_weight, parallel_mode):
    """
    Returns True, when the end of a step is compiled, or raises. Use the result, since graph mode may warn of an unused
    one.
    """
    owner, of_each, several = expected
    check_shapes(owner, of_each, several, shapes)
    check_loss(owner, names, not has_loss)
    if has_weight:
        check_weight(owner, "weight", parallel_mode)
    return True


def shapes_of(owner, several, grads):
    """Returns the shapes of what was passed. Raises unless these are tuples, or lists, of Tensors."""
    for i, its in enumerate(grads):
        if not isinstance(its, (tuple, list)) or not all(isinstance(each, Tensor) for each in its):
            of_optimizer = f" of optimizer {i}" if several else ""
            raise TypeError(
                f"For '{owner}', the gradients{of_optimizer} must be a tuple of Tensors, one for each weight, but got "
                f"{describe(its)}."
            )
    return tuple(tuple(tuple(each.shape) for each in its) for its in grads)
