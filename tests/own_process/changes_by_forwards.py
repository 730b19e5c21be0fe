"""Tests for a process of their own: what a forward really changes was found by reading its source."""

import numpy as np
import pytest
from support.forward_writing_networks import RUNNABLE, batch, names_of_all

from ms_lossscale.forward_writes import find_forward_writes


def values_of(network):
    parameters = {parameter.name: parameter.asnumpy().copy() for parameter in network.get_parameters()}
    return {**parameters, **{f"buffer {name}": buffer.asnumpy().copy() for name, buffer in network.named_buffers()}}


@pytest.mark.parametrize("cls", RUNNABLE, ids=lambda cls: cls.__name__)
def test_what_changes_is_what_was_found(cls, mode):
    network = cls().set_train()
    writes = find_forward_writes((network,))
    assert writes.undecided == []
    before = values_of(network)
    network(batch())
    after = values_of(network)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed
    assert changed <= set(names_of_all(network, writes))
