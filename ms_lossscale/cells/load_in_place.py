"""Loading values into Parameters that compiled code uses."""

from collections.abc import Mapping

from mindspore import Tensor

from ms_lossscale._arguments import describe, listed
from ms_lossscale._mindspore import write_in_place

_SHOWN = 5


def check_parameters(owner, own, parameters):
    """What `load_in_place` takes: Parameters or Tensors, of the shapes of `own`."""
    what = (
        f"For '{owner}.load_state_dict', the argument 'parameters' must be a dict from names to Parameters or Tensors"
    )
    if not isinstance(parameters, Mapping):
        raise TypeError(f"{what}, but got {describe(parameters)}. Pass what mindspore.load_checkpoint returns.")
    for name, value in parameters.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{what}, but {name!r} is {describe(value)}.")
        if name in own and tuple(value.shape) != tuple(own[name].shape):
            raise ValueError(
                f"For '{owner}.load_state_dict', {name!r} must have the shape {tuple(own[name].shape)}, but got "
                f"{tuple(value.shape)}. Nothing was loaded."
            )


def load_in_place(owner, own, parameters, strict):
    """
    Writes `parameters`, which were checked, into those of `own` that have the same names; see
    `TrainingCell.load_state_dict`.
    """
    missing = [name for name in own if name not in parameters]
    unexpected = [name for name in parameters if name not in own]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"For '{owner}.load_state_dict', 'parameters' must hold what the cell has, but {_listed(missing)} missing "
            f"and {_listed(unexpected)} unexpected. Construct the cell with the same arguments as the one that was "
            f"saved, or pass strict=False to load what fits. Nothing was loaded."
        )
    write_in_place([(parameter, parameters[name]) for name, parameter in own.items() if name in parameters])
    return missing, unexpected


def _listed(names):
    if not names:
        return "none is"
    return f"{listed(names, _SHOWN)} {'is' if len(names) == 1 else 'are'}"
