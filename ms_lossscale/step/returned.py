"""What a network returned: what is trained and what is aux, or an error that says what it was."""

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale.step.nested import described


def loss_of(owner, number, output, may_return_tuple):
    """The loss that a network without aux returned, of any shape."""
    check_no_image(owner, number, output)
    if may_return_tuple and isinstance(output, tuple) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Tensor):
        _not_one_loss(owner, number, described(output))
    return output


def loss_and_aux_of(owner, number, output):
    """The loss, of any shape, and the tuple of aux that a network returned."""
    check_no_image(owner, number, output)
    if not isinstance(output, tuple) or len(output) == 0 or not isinstance(output[0], Tensor):
        _no_aux(owner, number, described(output))
    return output[0], output[1:]


def check_losses(owner, losses, has_aux, output):
    """The losses that one network returned for several optimizers; raises unless aux comes only with `has_aux`."""
    check_no_image(owner, 0, output)
    fits = isinstance(output, tuple) and (len(output) == losses or (has_aux and len(output) > losses))
    if not fits:
        _not_the_losses(owner, losses, has_aux, described(output))
    for loss in output[:losses]:
        if not isinstance(loss, Tensor):
            _not_the_losses(owner, losses, has_aux, described(output))
    # To be used: graph mode warns of a call that is dropped since it gives nothing.
    return output[:losses]


def check_no_image(owner, number, output):
    """Raises if what comes first looks like an image, and a later one like its loss: the image would be trained."""
    if isinstance(output, (tuple, list)) and len(output) > 1 and isinstance(output[0], Tensor):
        later = ()
        for each in output[1:]:
            if isinstance(each, Tensor):
                later += (each.shape if each.dtype != mstype.bool_ else None,)
            else:
                later += (() if isinstance(each, (int, float)) and not isinstance(each, bool) else None,)
        if _is_image_before_loss(output[0].shape, later):
            _image_first(owner, number, described(output))


# Functions of constants: graph mode runs them when it compiles, and hands on what they raise as it is. With
# `set_inputs` it knows None in the place of a shape, or of a length, that varies.


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
        f"which trains the first alone."
    )


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
