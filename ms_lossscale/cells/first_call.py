"""What is looked at before the first step: the number of inputs that each network gets, and the networks' modes."""

from mindspore import nn

from ms_lossscale._signatures import takes
from ms_lossscale.cells.evaluation_mode import warn_of_evaluation_mode
from ms_lossscale.function_network import name_of
from ms_lossscale.step.forward_backward import inputs_of

_COMPUTES_THE_LOSS = "write a Cell whose construct takes all inputs and returns the loss"


class CallCheck:
    """Refuses calls with a number of inputs that a network surely can't take; warns once of evaluation mode."""

    def __init__(self, cell):
        self._owner, self._network_inputs = type(cell).__name__, cell.network_inputs
        self._forward_backwards = [
            part for step in cell.steps for part in step.forwards_and_backwards.forward_backwards
        ]
        # The construct of a user's subclass may pass on others than it takes.
        self._knows_inputs = type(cell).construct.__module__.startswith("ms_lossscale.")
        self._modes_checked = False
        # The numbers of inputs that were found to fit.
        self.fitting_counts = set()

    def __call__(self, inputs, keywords):
        """Checks the inputs of a call and, at the first one, the modes of the networks."""
        if not self._modes_checked:
            self._modes_checked = True
            warn_of_evaluation_mode(self._owner, [part.network for part in self._forward_backwards])
        if self._knows_inputs:
            self._check_inputs(inputs, keywords)
        self.fitting_counts.add(len(inputs))

    def _check_inputs(self, inputs, keywords):
        parts = self._forward_backwards
        if keywords:
            raise TypeError(
                f"For '{self._owner}', inputs are passed by position, in the order of the network's construct, but "
                f"got {', '.join(map(repr, keywords))} by keyword."
            )
        for i, part in enumerate(parts):
            its_inputs = inputs_of(self._owner, i, self._network_inputs, inputs)
            name = name_of(part.network)
            its = takes(part.network)
            if its is not None and not its.fits(len(its_inputs)):
                network = f"network {i}, '{name}'," if len(parts) > 1 else f"'{name}'"
                misfit = self._misfit(i, its, its_inputs, inputs, len(parts) > 1)
                raise TypeError(f"For '{self._owner}', {network} takes {its.written()}, but {misfit}")
            if type(part.network) is nn.WithLossCell:
                _check_within(self._owner, part.network)

    def _misfit(self, i, its, its_inputs, inputs, is_one_of_several):
        """Returns the end of a sentence that says what network `i` gets instead, and what to do."""
        call = f"the cell was called with {len(inputs)}"
        if self._network_inputs is not None:
            return f"network_inputs gives it {len(its_inputs)}, those at the positions {self._network_inputs[i]}."
        if is_one_of_several:
            return (
                f"{call}, and each network gets all inputs of the call. Pass the positions of those that each one "
                f"takes: network_inputs=[(0, 1), (1,)], say."
            )
        if its.by_keyword:
            return f"inputs are passed by position. Give {', '.join(its.by_keyword)} a default."
        if len(inputs) > its.required:
            return (
                f"{call}. If it does not return the loss, pass the cell nn.WithLossCell(network, loss_fn), which takes "
                f"data and label, or {_COMPUTES_THE_LOSS}."
            )
        if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) and its.fits(len(inputs[0])):
            return f"{call}, a {type(inputs[0]).__name__}. Unpack it: cell(*inputs)."
        missing = ", ".join(its.names[len(inputs) : its.required])
        return (
            f"{call}, so that {missing} would be missing. If Model calls it, pass Model(cell) without loss_fn, with a "
            f"dataset that has a column for each input."
        )


def _check_within(owner, network):
    """Raises if an nn.WithLossCell can't call what it holds."""
    for cell, count, what in ((network._backbone, 1, "the data"), (network._loss_fn, 2, "the output and the label")):
        its = takes(cell) if isinstance(cell, nn.Cell) else None
        if its is not None and not its.fits(count):
            raise TypeError(
                f"For '{owner}', '{type(cell).__name__}' takes {its.written()}, but nn.WithLossCell passes it {what} "
                f"only. Instead of nn.WithLossCell, {_COMPUTES_THE_LOSS}."
            )
