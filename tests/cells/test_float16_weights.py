"""An optimizer gets the gradient of a float16 weight in float16: what becomes infinite there has overflowed."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from support.training import bookkeeping, by_sgd, changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

# Finite in float16 times a scale of 1/4, but not by itself.
TOO_LARGE = 2.0**17
SCALE = 0.25


class Mixed(nn.Cell):
    """The gradients of its float32 weight and of its float16 weights are the slopes. Of the latter there are so many
    that they are worked on as one tensor."""

    def __init__(self, name="net"):
        super().__init__()
        self.single = Parameter(Tensor(np.ones(3, np.float32)), name=f"{name}.single")
        for i in range(4):
            setattr(self, f"half_{i}", Parameter(Tensor(np.ones(3, np.float16)), name=f"{name}.half_{i}"))
        self.halves = [f"{name}.half_{i}" for i in range(4)]

    def construct(self, wide, narrow):
        halves = self.half_0.astype(mstype.float32)
        for half in (self.half_1, self.half_2, self.half_3):
            halves = halves + half.astype(mstype.float32)
        return (self.single * wide).sum() + (halves * narrow).sum()


def slope(value):  # One element of three is large.
    return Tensor(np.float32([1, value, 1]))


def assert_skips(cell, names):
    before = state(cell)
    assert bool(cell(slope(1), slope(TOO_LARGE))[1].asnumpy().any())
    names_changed = changed(before, state(cell))
    assert names_changed == bookkeeping(names_changed) | {n for n in names_changed if n.startswith("clipping.")}
    assert cell.overflowed_parameters() == names
    # Of other weights it is as good as any.
    assert not bool(cell(slope(TOO_LARGE), slope(1))[1].asnumpy().any())


class Strict(nn.Cell):  # An optimizer that refuses gradients of another dtype than its weights'.
    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)

    def construct(self, grads):
        for i, parameter in enumerate(self.parameters):
            if grads[i].dtype != parameter.dtype:
                raise TypeError("a gradient of another dtype")
            ops.assign_sub(parameter, grads[i])


@quick_in_pynative_mode
@pytest.mark.parametrize("keywords", [{"clip_norm": 1.0}, *slow({}, {"max_retries": 1})], ids=str)
def test_a_gradient_that_the_cast_makes_infinite_skips_the_step(mode, keywords):
    network = Mixed()
    cell = by_sgd(network, DynamicLossScale(SCALE, min_loss_scale=2.0**-6), 2.0**-10, **keywords)
    assert_skips(cell, network.halves)
    # The update rule sees each try.
    assert cell.get_loss_scale() == SCALE / (4 if "max_retries" in keywords else 2)
    if "clip_norm" in keywords:
        # What float16 can hold is measured as it is.
        cell(slope(1), slope(2.0**-30))
        np.testing.assert_allclose(cell.grad_norm(), np.sqrt(3 + 4 * (2 + 2.0**-60)), rtol=1e-6)
        cell(slope(1), slope(TOO_LARGE))
        assert not np.isfinite(cell.grad_norm())


@quick_in_pynative_mode
def test_of_a_cycle_the_mean_is_cast_to_the_dtypes_of_the_weights(mode):
    network = Mixed()
    optimizer = Strict(network.trainable_params())
    cell = ScaledTrainOneStepCell(network, optimizer, SCALE, gradient_accumulation_steps=2).set_train()
    before = state(network)
    cell(slope(1), slope(TOO_LARGE))
    assert bool(cell(slope(1), slope(TOO_LARGE))[1])
    cell(slope(1), slope(TOO_LARGE))
    cell.flush()
    assert changed(before, state(network)) == set()
    assert cell.counters()["skipped_steps"] == 2
    # Its calls may be larger than their mean.
    cell(slope(1), slope(0.75 * TOO_LARGE))
    assert not bool(cell(slope(1), slope(0))[1])
    np.testing.assert_array_equal(network.half_3.asnumpy(), np.float16([0, 1 - 0.375 * TOO_LARGE, 0]))


@quick_in_pynative_mode
def test_of_several_scales_that_of_its_network_moves(mode):
    networks = [Mixed("first"), Mixed("second")]
    rules = [DynamicLossScale(SCALE, min_loss_scale=2.0**-6) for _ in networks]
    cell = by_sgd(networks, rules, 2.0**-10, "simultaneous", network_inputs=[(0, 0), (0, 1)])
    assert bool(cell(slope(1), slope(TOO_LARGE))[1])
    assert cell.overflowed_parameters() == networks[1].halves
    assert cell.get_loss_scale() == [SCALE, SCALE / 2]
