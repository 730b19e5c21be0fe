"""Every diagnosis names the weights that are not finite themselves."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from ms_lossscale._values import named_counts, not_finite_weights

NAN, INF = float("nan"), float("inf")


def parameter(name, values, dtype=mstype.float32, requires_grad=True):
    return Parameter(Tensor(values, dtype), name=name, requires_grad=requires_grad)


@pytest.mark.parametrize("dtype", [mstype.float16, mstype.float32, mstype.bfloat16, mstype.float64])
def test_values_are_counted_by_weight(dtype):
    weights = [
        parameter("one", [1.0, NAN, 2.0], dtype),
        parameter("good", [1.0, 2.0], dtype),
        parameter("three", [[INF, -INF], [NAN, 0.0]], dtype),
        parameter("integers", [1, 2], mstype.int32),
    ]
    assert not_finite_weights(weights) == {"one": 1, "three": 3}
    assert named_counts(not_finite_weights(weights)) == "one (1 value), three (3 values)"


def test_a_mask_is_no_weight():
    mask = np.float32([[0, -INF], [0, 0]])
    assert not_finite_weights([parameter("mask", mask, requires_grad=False)]) == {}
    assert not_finite_weights([parameter("weight", mask)]) == {"weight": 1}
    frozen = parameter("frozen", [-INF, INF, NAN, 1.0], requires_grad=False)
    assert not_finite_weights([frozen]) == {"frozen": 2}
