"""A cell that has made steps can be compiled into another graph, for other shapes, and flushed, in every order."""

import itertools

import numpy as np
import pytest
from conftest import nightly
from mindspore import Tensor, jit
from support.linear_pair import Trained, arrays
from support.networks import Around
from support.training import changed, state

pytestmark = pytest.mark.slow


class Uses:  # The ways to use a training cell, each on the next batch of a sequence.
    def __init__(self, kind):
        self.kind, self.cell, self._seed = kind, Trained(kind, steps=2, clip_norm=0.5, ema_decay=0.5).cell, 0
        self._outer, cell = Around(self.cell).set_train(), self.cell

        @jit
        def compiled(*inputs):
            return cell(*inputs)

        self._compiled = compiled

    def use(self, how):
        self._seed += 1
        call = {"jitted": self._compiled, "outer": self._outer, "new_shape": self._outer}.get(how, self.cell)
        x0, x1, y = map(Tensor, arrays(self._seed, batch=6 if how == "new_shape" else 4))
        call(*((x0, y) if self.kind == "scaled" else (x0, x1, y)))
        if how == "flush":
            self.cell.flush()


# All share what is compiled again.
@pytest.mark.parametrize("kind", ["alternating", *nightly("scaled", "simultaneous")])
def test_each_use_right_after_each_other_one(mode, kind):
    # Cells that are compiled anew for each pair would take an hour: one cell goes through all of them.
    used, expected = Uses(kind), Uses(kind)
    for how in itertools.chain(*itertools.permutations(["eager", "jitted", "outer", "new_shape", "flush"], 2)):
        used.use(how)
        expected.use({"jitted": "eager", "outer": "eager"}.get(how, how))
    held = state(used.cell)
    assert not changed(held, state(expected.cell))
    assert all(np.isfinite(values).all() for values in held.values())
