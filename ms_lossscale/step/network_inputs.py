"""Which of the step's inputs each network takes."""

import numbers

from ms_lossscale._arguments import describe


def check_network_inputs(owner, network_inputs, networks):
    """Raises unless `network_inputs` is None or gives positions for each network. Returns it as a tuple of tuples."""
    if network_inputs is None:
        return None
    what = f"For '{owner}', the argument 'network_inputs' must be None or a list with a tuple of positions for each"
    if not isinstance(network_inputs, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in network_inputs):
        raise TypeError(f"{what} network, [(1,), (0, 1)] say, but got {describe(network_inputs)}.")
    if len(network_inputs) != len(networks):
        raise ValueError(f"{what} of the {len(networks)} networks, but got {len(network_inputs)}: {network_inputs!r}.")
    for position in (position for positions in network_inputs for position in positions):
        if not isinstance(position, numbers.Integral) or isinstance(position, bool):
            raise TypeError(f"{what} network, integers >= 0, but got {describe(position)}.")
        if position < 0:
            raise ValueError(f"{what} network, integers >= 0 counted from the first input, but got {position}.")
    return tuple(tuple(int(position) for position in positions) for positions in network_inputs)


def inputs_of(owner, i, network_inputs, inputs):
    """The inputs that network `i` of the cell `owner` takes."""
    if network_inputs is None:
        return inputs
    taken = ()
    for position in network_inputs[i]:
        if position >= len(inputs):
            raise ValueError(
                f"For '{owner}', the argument 'network_inputs' gives network {i} the input at position {position}, but "
                f"the cell was called with {len(inputs)} inputs. Positions count from 0."
            )
        taken += (inputs[position],)
    return taken
