"""What a training cell was built from can't be assigned afterwards."""

import inspect

from mindspore import nn

from ms_lossscale._fixed_attributes import FixedAttributes

# Made by MindSpore's constructor of its arguments, or known from its cells.
_OF_STOCK_CELLS = ("weights", "grad_reducer", "scale_sense")
_SCALES = ("loss_scale", "scale_sense", "sens")


class FixedArguments(FixedAttributes):
    """Base class of the training cells: assigning an argument of the constructor afterwards raises an error."""

    def fix_arguments(self, of_base: type) -> None:
        """Fixes the arguments of the class that is derived from `of_base`, and of MindSpore's cell."""
        # Not those of a user's subclass: its own attributes are the user's.
        own = [each for each in type(self).__mro__ if of_base in each.__bases__]
        arguments = [inspect.signature(each.__init__).parameters for each in (*own, nn.TrainOneStepCell)]
        self.fix(*_OF_STOCK_CELLS, *(name for its in arguments for name in its if name != "self"))

    def _instead_of_assigning(self, name):
        if name == "every":
            return "Call set_every(...), which applies from the next call on."
        cure = (
            "Construct a new cell with other arguments; new_cell.load_state_dict(cell.parameters_dict(), strict=False) "
            "continues from the state of this one."
        )
        return f"Set the scale itself with set_loss_scale(value). {cure}" if name in _SCALES else cure
