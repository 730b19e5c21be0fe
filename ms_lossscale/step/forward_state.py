"""What a training forward writes besides its result, and how a skipped step takes it back."""

from mindspore import Parameter, ParameterTuple, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale._check import describe

# The statistics of MindSpore's normalisation cells (`nn` and `mint.nn`) and of user's own cells that name theirs alike.
_STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked")


def find_forward_state(networks):
    """The statistics that the networks' forward writes, each once."""
    found = {}
    for network in networks:
        for _, cell in network.cells_and_names():
            for name in _STATISTICS:
                parameter = getattr(cell, name, None)
                if isinstance(parameter, Parameter) and not parameter.requires_grad:
                    found[id(parameter)] = parameter
    return list(found.values())


class ForwardState(nn.Cell):
    """
    The Parameters that a training forward writes.

    Args:
        networks (tuple[Cell]): The networks, whose normalisation statistics are found.
        further (Union[list, tuple]): Further Parameters, those of a user's own cells.
        owner (str): The cell that was given `further`, for the error message.
        over_calls (bool): Whether the copies have to outlast a call: with accumulation a skipped window takes back
            what its calls' forwards wrote, also if training was stopped and resumed in between.
        prefix (str): For the names of the copies that outlast a call.
    """

    def __init__(self, networks, further, owner, over_calls, prefix):
        super().__init__(auto_prefix=False)
        if not isinstance(further, (list, tuple)):
            raise TypeError(
                f"For '{owner}', the argument 'forward_state' must be a list or tuple of Parameters, but got "
                f"{describe(further)}."
            )
        for parameter in further:
            if not isinstance(parameter, Parameter):
                raise TypeError(
                    f"For '{owner}', the argument 'forward_state' must hold Parameters only, but got "
                    f"{describe(parameter)}."
                )
        found = {id(parameter): parameter for parameter in (*find_forward_state(networks), *further)}
        self.is_empty = not found
        self._over_calls = over_calls
        if found:
            self.parameters = ParameterTuple(found.values())
            if over_calls:
                self.copies = ParameterTuple(
                    Parameter(
                        ops.deepcopy(parameter), name=f"{prefix}forward_state.{parameter.name}", requires_grad=False
                    )
                    for parameter in found.values()
                )

    def save(self, inputs, is_first):
        """
        Copies the state before the forward, which `inputs` are tied to. Returns the inputs and the copies.

        With `over_calls` only the first call of a window copies, and the copies stay here.
        """
        if self.is_empty:
            return inputs, ()
        if self._over_calls:
            return ops.depend(inputs, self._save_over_calls(is_first)), ()
        saved = gradients.copy(self.parameters)
        return ops.depend(inputs, saved), saved

    def _save_over_calls(self, is_first):
        if is_first:
            gradients.assign(self.copies, self.parameters)
        return is_first

    def restore(self, saved=()):
        """Writes the copies back."""
        if not self.is_empty:
            gradients.assign(self.parameters, self.copies if self._over_calls else saved)
