"""A cell that has made steps can be compiled into another graph, for other shapes, and flushed, in every order."""

import itertools

import numpy as np
import pytest
from mindspore import Tensor, jit, nn
from support.linear_pair import CELLS, Trained, arrays
from support.training import same_bits, state

pytestmark = pytest.mark.slow

STEPS = 2


class Outer(nn.Cell):  # A cell of a user's own around a training cell.
    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell

    def construct(self, *inputs):
        return self.cell(*inputs)


class Uses:  # The ways to use a training cell, each on the next batch of a sequence.
    def __init__(self, kind):
        self.trained = Trained(kind, steps=STEPS, clip_norm=0.5, ema_decay=0.5)
        cell = self.trained.cell
        self.cell = cell
        self._outer = Outer(cell).set_train()

        @jit
        def compiled(*inputs):
            return cell(*inputs)

        self._compiled, self._seed = compiled, 0

    def _inputs(self, batch):
        self._seed += 1
        x0, x1, y = (Tensor(array) for array in arrays(self._seed, batch=batch))
        return (x0, y) if self.trained.kind == "scaled" else (x0, x1, y)

    def eager(self):
        self.cell(*self._inputs(batch=4))

    def jitted(self):
        self._compiled(*self._inputs(batch=4))

    def outer(self):
        self._outer(*self._inputs(batch=4))

    def new_shape(self):
        self._outer(*self._inputs(batch=6))

    def flush(self):
        self.eager()
        self.cell.flush()


def of_which(one):  # The cells, of which the others wait for a release: all of them share what is compiled again.
    return [kind if kind == one else pytest.param(kind, marks=pytest.mark.nightly) for kind in CELLS]


ORDERS = list(itertools.permutations(["eager", "jitted", "outer", "new_shape", "flush"]))
SOME_ORDERS = [ORDERS[i] for i in range(0, len(ORDERS), 7)]


def test_the_orders_have_each_use_right_after_each_other_one():
    pairs = {pair for order in SOME_ORDERS for pair in zip(order, order[1:])}
    assert pairs == set(itertools.permutations(ORDERS[0], 2))


@pytest.mark.parametrize("kind", of_which("alternating"))
def test_in_every_order(mode, kind):
    # Cells that are compiled anew for each order would take an hour: one cell goes through all of them.
    used, expected = Uses(kind), Uses(kind)
    for order in SOME_ORDERS:
        for use in order:
            getattr(used, use)()
            expected_use = {"jitted": "eager", "outer": "eager"}.get(use, use)
            getattr(expected, expected_use)()
    ours, others = state(used.cell), state(expected.cell)
    assert ours.keys() == others.keys()
    for name in ours:
        assert same_bits(ours[name], others[name]), name
    assert all(np.isfinite(values).all() for values in ours.values())
