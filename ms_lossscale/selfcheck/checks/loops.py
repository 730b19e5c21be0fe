"""Steps that the host does not start one by one: loops in a compiled function, and `dataset_sink_mode`."""

import contextlib

import numpy as np
from mindspore import Tensor, jit
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

from ms_lossscale import DynamicLossScale
from ms_lossscale.selfcheck.claim import check, differing, expect_equal, values
from ms_lossscale.selfcheck.networks import cell_of_linear, regression

STEPS = 6


def _cell():
    return cell_of_linear(0, DynamicLossScale(2.0**10, scale_window=4))


def _expect_the_same(cell, expected, what):
    expect_equal(differing(values(cell), values(expected)), [], f"what differs between {what} and as many calls")


def _called(steps):
    cell, batch = _cell(), tuple(map(Tensor, regression(0)))
    for _ in range(steps):
        cell(*batch)
    return cell


@contextlib.contextmanager
def _host_reads():
    """A context that gives a list of how the host reads values of tensors in it."""
    reads = []
    originals = {name: getattr(Tensor, name) for name in ("asnumpy", "item", "__bool__", "__float__", "__int__")}

    def noted(name):
        def read(tensor, *args):
            reads.append(name)
            return originals[name](tensor, *args)

        return read

    for name in originals:
        setattr(Tensor, name, noted(name))
    try:
        yield reads
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def _expect_a_loop(steps, cell, *inputs):
    """Expects of a compiled loop that it makes the same steps, and that the host waits for none."""
    steps(*inputs)
    # The first call compiled.
    with _host_reads() as reads:
        steps(*inputs)
    expect_equal(reads, [], "what the host reads in a loop")
    _expect_the_same(cell, _called(2 * STEPS), "a compiled loop, twice,")


@check()
def a_compiled_for_loop_makes_the_same_steps(device):
    """A `for` loop under `mindspore.jit` makes the same steps, bit for bit, and the host reads nothing in it."""
    cell = _cell()

    @jit
    def steps(x, y):
        loss = 0.0
        for _ in range(STEPS):
            loss = cell(x, y)[0]
        return loss

    _expect_a_loop(steps, cell, *map(Tensor, regression(0)))


@check()
def a_compiled_while_loop_makes_the_same_steps(device):
    """A `while` loop under `mindspore.jit` makes the same steps, bit for bit, and the host reads nothing in it."""
    cell = _cell()

    @jit
    def steps(x, y, count):
        loss = x.sum()
        while count > 0:
            loss = cell(x, y)[0]
            count = count - 1
        return loss

    _expect_a_loop(steps, cell, *map(Tensor, regression(0)), Tensor(STEPS))


@check()
def sink_mode_makes_the_same_steps(device):
    """`Model.train` with `dataset_sink_mode=True` makes the same steps, bit for bit."""
    x, y = (np.tile(each, (STEPS, 1)) for each in regression(0))
    cell = _cell()
    batches = NumpySlicesDataset((x, y), shuffle=False).batch(len(x) // STEPS)
    Model(cell).train(1, batches, dataset_sink_mode=True)
    _expect_the_same(cell, _called(STEPS), "Model.train in sink mode")
