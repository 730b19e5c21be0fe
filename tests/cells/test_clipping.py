"""Clipping of unscaled gradients, by norm and by value, over the whole range of float32, and grad_norm()."""

import math

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import ScaledTrainOneStepCell

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


@quick_in_graph_mode
@pytest.mark.parametrize("clip", [{"clip_norm": 2.0}, {"clip_value": 0.5}], ids=str)
def test_unscaled_gradients_over_the_whole_range_of_float32(mode, clip):
    clipped = Clipped(**clip)
    signs, mantissas = st.sampled_from([1.0, -1.0]), st.floats(0.5, 1.0, exclude_max=True, width=32)

    # With a scale, what lies within the range of float32 times it, too.
    @settings(max_examples=80, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from([(1.0, -124, 128), (2.0**16, -110, 110), (2.0**-10, -110, 110), (1e3, -110, 110)]), st.data()
    )
    def check(scale_and_exponents, data):
        scale, *exponents = scale_and_exponents
        numbers = st.builds(lambda sign, *its: sign * math.ldexp(*its), signs, mantissas, st.integers(*exponents))
        gradient = data.draw(st.lists(st.one_of(st.just(0.0), numbers), min_size=7, max_size=7))
        clipped.cell.set_loss_scale(scale)
        actual, overflow = clipped(gradient)
        assert not overflow
        if "clip_norm" in clip:
            assert_close(actual, clipped_by_norm(gradient, 2.0))
            np.testing.assert_allclose(clipped.cell.grad_norm(), norm(gradient), rtol=RELATIVE)
        else:
            assert_close(actual, np.clip(np.asarray(gradient, np.float32), -0.5, 0.5))

    check()


# Where the factor that clips is no normal float32 number, or only together with the one that unscales.
@pytest.mark.parametrize(
    "clip_norm, scale, element",
    [(1e-2, 1.0, 1e38), (1e-2, 2.0**16, 1e33), (1e-20, 2.0**60, 1e15), (1e30, 1.0, 1e-37), (1e-20, 2.0**-10, 1e38)],
)
@quick_in_pynative_mode
def test_factors_at_both_ends_of_float32(mode, clip_norm, scale, element):
    clipped = Clipped(clip_norm=clip_norm)
    clipped.cell.set_loss_scale(scale)
    gradient = np.array([1.0, -1.0, 0.5, 0.0, 0.25, -0.5, 1.0]) * element
    actual, overflow = clipped(gradient)
    assert not overflow
    assert np.abs(actual).max() > 0
    assert_close(actual, clipped_by_norm(gradient, clip_norm))
