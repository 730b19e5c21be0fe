"""Asserts that looking into a network leaves it, and MindSpore, unchanged."""

import contextlib

import mindspore
import numpy as np

from support.training import changed, state


def _flags(network):
    # A cell whose mode was never set has no flag, which means that it is not in training.
    return [(name, {"training": False, **cell.get_flags()}, cell.training) for name, cell in network.cells_and_names()]


def _hooks(network):  # The numbers of the cells' hooks, for which MindSpore has no public function.
    return [
        (name, len(cell._forward_hook), len(cell._forward_pre_hook), len(cell._backward_hook))
        for name, cell in network.cells_and_names()
    ]


@contextlib.contextmanager
def untouched(network):
    """A context that must change nothing: no Parameter, bit for bit, no flags and hooks of cells, nor MindSpore's mode
    or random state."""
    before = state(network), _flags(network), _hooks(network)
    mode, random_state = mindspore.get_context("mode"), mindspore.get_rng_state().asnumpy()
    yield
    assert not changed(before[0], state(network))
    assert before[1:] == (_flags(network), _hooks(network))
    assert mindspore.get_context("mode") == mode
    np.testing.assert_array_equal(mindspore.get_rng_state().asnumpy(), random_state)
