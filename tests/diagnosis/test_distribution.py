"""Distribution counts values by size; what it says a cast would do agrees with NumPy's cast exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mindspore import dtype as mstype
from support.numpy_casts import CASTS, bfloat16, counts_of, shares_of_cast

from ms_lossscale.diagnosis.distribution import Distribution

SCALES = [2.0**exponent for exponent in (-126, -40, -15, -3, -1, 0, 1, 2, 8, 10, 16, 24, 25, 60, 126)]


def distribution_of(*arrays):
    distribution = Distribution()
    for array in arrays:
        distribution.add(np.asarray(array))
    return distribution


def assert_shares_agree(values, scales=SCALES):
    distribution = distribution_of(values)
    for dtype in CASTS:
        for scale in scales:
            assert distribution.shares(scale, dtype) == shares_of_cast(values, scale, dtype), (dtype, scale)


def neighbours(value, steps=3):
    """The float32 numbers around a value."""
    below, above = [np.float32(value)], [np.float32(value)]
    for _ in range(steps):
        below.append(np.nextafter(below[-1], np.float32(0)))
        above.append(np.nextafter(above[-1], np.finfo(np.float32).max))
    return below + above


def test_the_control_rounds_as_float32_is_cut_to_bfloat16():
    values = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    bits = values.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    np.testing.assert_array_equal(bfloat16(values.astype(np.float64)), bits.astype(np.uint32).view(np.float32))


def test_edges_at_every_scale():
    edges = (2.0**-25, 2.0**-14 - 2.0**-25, 65520.0, 2.0**-134, 2.0**-126 - 2.0**-134, 2.0**127 * (2 - 2.0**-8))
    for exponent in range(-126, 127):
        # Where they are float32 numbers: those that the scale takes to an edge.
        at = [edge * 2.0**-exponent for edge in edges if 2.0**-149 <= edge * 2.0**-exponent < 2.0**128]
        values = np.array([each for edge in at for each in neighbours(edge, 1)], np.float32)
        assert_shares_agree(values, [2.0**exponent])


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_subnormal=True)))
@settings(max_examples=150, deadline=None)
def test_any_values(values):
    assert_shares_agree(values)
    assert distribution_of(values).as_dict() == counts_of(values)


def test_values_of_several_chunks():
    values = np.random.default_rng(0).normal(size=2**20 + 2**19 + 7).astype(np.float32) * np.float32(1e-7)
    assert_shares_agree(values, [1.0, 2.0**10])


@given(*[hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32))] * 2)
@settings(max_examples=50, deadline=None)
def test_merging_is_adding_both(one, other):
    merged = distribution_of(one)
    merged.merge(distribution_of(other))
    for expected in (distribution_of(one, other), distribution_of(np.concatenate([one, other]))):
        assert merged.as_dict() == expected.as_dict()
        assert all(merged.shares(scale) == expected.shares(scale) for scale in (2.0**-30, 1.0, 2.0**30))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("8",), TypeError, "'loss_scale' must be a number, but got '8'"),
        ((3.0,), ValueError, "'loss_scale' must be a power of two, but got 3.0"),
        ((2.0**127,), ValueError, "'loss_scale' must be a finite number > 0"),
        ((float("nan"),), ValueError, "'loss_scale' must be a finite number > 0"),
        ((1.0, mstype.float32), ValueError, r"'dtype' must be mstype.float16 or bfloat16, but got .*float32"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Distribution().shares(*arguments)
