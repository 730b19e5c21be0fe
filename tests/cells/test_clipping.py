"""Clipping of unscaled gradients, by norm and by value, over the whole range of float32, and grad_norm()."""

import itertools
import math

import numpy as np
import pytest
from conftest import quick_in_graph_mode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import ScaledTrainOneStepCell

NAN, INF = float("nan"), float("inf")

# The norm is a sum of seven squares, a root, a division and one or two products in float32, each rounded to 2**-24 =
# 6e-8: ten of them are 6e-7.
RELATIVE = 1e-6
# Below it, float32 has no relative precision, and graph mode flushes to zero.
SMALLEST_NORMAL = 2.0**-126


class Clipped:
    """A cell whose update shows the gradient that reached the optimizer: SGD from 0 with a learning rate of 1."""

    def __init__(self, **keywords):
        vector, matrix = (Parameter(ops.zeros(shape), name=name) for name, shape in (("vector", 3), ("matrix", (2, 2))))
        self.weights = [vector, matrix]

        def given_gradients(its_vector, its_matrix):
            return (vector * its_vector).sum() + (matrix * its_matrix).sum()

        self.cell = ScaledTrainOneStepCell(given_gradients, nn.SGD(self.weights, 1.0), 1.0, **keywords).set_train()

    def __call__(self, gradient):  # The seven elements of a gradient after clipping, and whether the step was skipped.
        for own in self.weights:
            ops.assign(own, ops.zeros_like(own))
        gradient = np.asarray(gradient, np.float32)
        overflow = self.cell(Tensor(gradient[:3]), Tensor(gradient[3:].reshape(2, 2)))[1]
        return -np.concatenate([own.asnumpy().ravel() for own in self.weights]), bool(overflow.asnumpy())


def norm(gradient):
    return float(np.sqrt(np.sum(np.asarray(gradient, np.float32).astype(np.float64) ** 2)))


def clipped_by_norm(gradient, clip_norm):
    gradient = np.asarray(gradient, np.float32).astype(np.float64)
    return gradient * (clip_norm / max(norm(gradient), clip_norm))


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=RELATIVE, atol=SMALLEST_NORMAL)


ORDINARY = [1.0, -2.0, 3.0, -0.5, 0.25, 4.0, -1.5]
# What lies within the range of float32 with the scales below, too.
GRADIENTS = {
    "ordinary": ORDINARY,
    "below the bound": [0.01 * value for value in ORDINARY],
    "zero": [0.0] * 7,
    **{name: [float(name) * value for value in ORDINARY] for name in ("1e10", "1e20", "1e30", "1e-20", "1e-30")},
    "tiny and ordinary": [1e-30, 1.0, 0, 0, 0, 1e-20, 0],
}


@quick_in_graph_mode
def test_by_norm_over_the_whole_range_of_float32(mode):
    clipped = Clipped(clip_norm=2.0)
    mantissas = st.floats(0.5, 1.0, exclude_max=True, width=32)
    sized = st.builds(math.ldexp, mantissas | mantissas.map(lambda each: -each), st.integers(-124, 128))
    elements = st.just(0.0) | sized

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(elements, min_size=7, max_size=7))
    def check(gradient):
        actual, overflow = clipped(gradient)
        assert not overflow
        assert_close(actual, clipped_by_norm(gradient, 2.0))
        np.testing.assert_allclose(clipped.cell.grad_norm(), norm(gradient), rtol=RELATIVE)

    check()


@quick_in_graph_mode
@pytest.mark.parametrize("clip", [{"clip_norm": 1.0}, {"clip_value": 0.5}], ids=str)
def test_unscaled_gradients_are_clipped(mode, clip):
    clipped = Clipped(**clip)
    for scale, (name, gradient) in itertools.product((2.0**16, 2.0**-10, 1000.0), GRADIENTS.items()):
        clipped.cell.set_loss_scale(scale)
        actual, overflow = clipped(gradient)
        assert not overflow, name
        if "clip_norm" in clip:
            assert_close(actual, clipped_by_norm(gradient, 1.0))
            np.testing.assert_allclose(clipped.cell.grad_norm(), norm(gradient), rtol=RELATIVE)
        else:
            assert_close(actual, np.clip(np.asarray(gradient, np.float32), -0.5, 0.5))
