"""Whether looking into a network left it, and MindSpore, as they were."""

import contextlib

import mindspore
import numpy as np

from support.training import changed, state


def _flags(network):
    # A cell that was never put in training or out of it has no flag, which means that it is not.
    return [(name, {"training": False, **cell.get_flags()}, cell.training) for name, cell in network.cells_and_names()]


def _hooks(network):
    """How many hooks the cells have: MindSpore has no public way to ask."""
    return [
        (name, len(cell._forward_hook), len(cell._forward_pre_hook), len(cell._backward_hook))
        for name, cell in network.cells_and_names()
    ]


@contextlib.contextmanager
def untouched(network):
    """
    A context after which everything is as before: every Parameter, bit for bit, the cells' flags and hooks, MindSpore's
    mode and its random state.
    """
    before = state(network), _flags(network), _hooks(network)
    mode, random_state = mindspore.get_context("mode"), mindspore.get_rng_state().asnumpy()
    yield
    assert not changed(before[0], state(network))
    assert before[1:] == (_flags(network), _hooks(network))
    assert mindspore.get_context("mode") == mode
    np.testing.assert_array_equal(mindspore.get_rng_state().asnumpy(), random_state)
