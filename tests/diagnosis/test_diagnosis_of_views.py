"""The diagnoses work on Parameters that are views, as `parameter.set_data(value.reshape(...))` makes them."""

import contextlib

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from support.networks import batch
from support.untouched import untouched

from ms_lossscale import (
    locate_overflow,
    profile_activations,
    profile_gradients,
)

BATCHES = [batch(seed) for seed in range(2)]


def become_view(parameter):
    """The same values, reshaped from another shape."""
    parameter.set_data(Tensor(parameter.asnumpy().reshape(-1, 1)).reshape(parameter.shape))


class WithViews(nn.Cell):
    """Its weight, and BatchNorm's scale, are views."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.weight = Parameter(Tensor(np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)), name="weight")
        become_view(self.weight)
        become_view(self.norm.gamma)

    def construct(self, x, y):
        return ops.square(ops.matmul(self.norm(x), self.weight) - y).mean()


def test_mindspore_does_not_assign_to_a_view_in_pynative_mode():
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    parameter = Parameter(Tensor(np.zeros((2, 3), np.float32)), name="view")
    become_view(parameter)
    # MindSpore 2.10 refuses, 2.7 writes to a copy.
    with contextlib.suppress(RuntimeError):
        ops.assign(parameter, Tensor(np.ones((2, 3), np.float32)))
    mindspore.set_context(mode=mode)
    # If this fails, MindSpore has mended it, and replay's way around it can go.
    assert not parameter.asnumpy().any()


DIAGNOSES = {
    "gradients": lambda cell: profile_gradients(cell, batches=BATCHES),
    "activations": lambda cell: profile_activations(cell, BATCHES),
    "overflow": lambda cell: locate_overflow(cell, BATCHES[0], loss_scale=1.0),
}


def test_of_a_network(mode):
    for diagnose in DIAGNOSES.values():
        network = WithViews()
        with untouched(network):
            diagnose(network)


def test_the_counts_are_those_of_the_same_network_without_views():
    with_views, without = WithViews(), WithViews()
    for parameter in (without.weight, without.norm.gamma):
        parameter.set_data(Tensor(parameter.asnumpy()))
    reports = [profile_gradients(network, batches=BATCHES).to_json() for network in (with_views, without)]
    assert reports[0] == reports[1]
