"""Loss scales as they are printed: what is pasted into Python is the same number."""

import numpy as np
import pytest

from ms_lossscale._output import LossScaleValues, written_scale


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (1024.0, "1024"),
        (65536.0, "65536"),
        (2.0**19, "524288"),
        (2.0**20, "2**20"),
        (2.0**33, "2**33"),
        (2.0**126, "2**126"),
        (0.5, "0.5"),
        (2.0**-6, "0.015625"),
        (2.0**-7, "2**-7"),
        (2.0**-126, "2**-126"),
        (1000.0, "1000"),
        (3.0 * 2**20, "3145728"),
        (float(np.float32(0.1)), "0.1"),
        (np.float32(2.0**24), "2**24"),
        (1000, "1000"),
    ],
)
def test_examples(value, text):
    assert written_scale(value) == text


def test_what_is_pasted_is_the_same_float32():
    rng = np.random.default_rng(0)
    values = [2.0**exponent for exponent in range(-126, 127)]
    values += map(float, np.exp2(rng.uniform(-126, 126, 1000)).astype(np.float32))
    values += map(float, np.rint(np.exp2(rng.uniform(0, 126, 1000))).astype(np.float32))
    for value in values:
        assert np.float32(eval(written_scale(value))) == value


def test_several():
    scales = LossScaleValues((2.0**33, 4096.0))
    assert scales.written() == "2**33/4096"
    assert str(scales) == "8589934592.0/4096.0"
