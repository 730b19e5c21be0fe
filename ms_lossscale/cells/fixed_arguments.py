"""What a training cell was built from can't be assigned afterwards."""

import inspect

from mindspore import nn

# Made by MindSpore's constructor of its arguments, or known from its cells.
_OF_STOCK_CELLS = ("weights", "grad_reducer", "scale_sense")
_SCALES = ("loss_scale", "scale_sense", "sens")


def fixed_arguments(cell_class, base):
    """Returns the names of the arguments of the class that is derived from `base`, and of MindSpore's cell."""
    # Not those of a user's subclass: its own attributes are the user's.
    own = [each for each in cell_class.__mro__ if base in each.__bases__]
    arguments = [inspect.signature(each.__init__).parameters for each in (*own, nn.TrainOneStepCell)]
    return [*_OF_STOCK_CELLS, *(name for its in arguments for name in its if name != "self")]


def instead_of_assigning(name):
    """Returns a sentence that says what to do instead of assigning an argument."""
    if name == "every":
        return "Call set_every(...), which applies from the next call on."
    cure = (
        "Construct a new cell with other arguments; new_cell.load_state_dict(cell.parameters_dict(), strict=False) "
        "continues from the state of this one."
    )
    return f"Set the scale itself with set_loss_scale(value). {cure}" if name in _SCALES else cure
