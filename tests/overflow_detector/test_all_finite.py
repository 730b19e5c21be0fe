"""all_finite: what is finite and what is not, in every form that gradients take."""

import numpy as np
import pytest
from mindspore import Tensor, mutable, nn
from mindspore import dtype as mstype

from ms_lossscale import all_finite

DTYPES = [mstype.float16, mstype.bfloat16, mstype.float32]


class AllFinite(nn.Cell):
    """`all_finite` inside a network: compiled in graph mode."""

    def construct(self, grads):
        return all_finite(grads)


class EmptyAllFinite(nn.Cell):
    def construct(self):
        return all_finite(())


@pytest.fixture(params=["top_level", "in_a_cell"])
def check(request, mode):
    """`all_finite` called by itself, or from a Cell."""
    in_a_cell = AllFinite()

    def checked(*grads):
        # A tuple that is not mutable is a constant to graph mode, which would then compile nothing but the answer.
        finite = all_finite(grads) if request.param == "top_level" else in_a_cell(mutable(grads))
        assert finite.dtype == mstype.bool_
        assert finite.shape == ()
        return bool(finite)

    return checked


def tensors(*values, dtype=mstype.float32):
    return tuple(Tensor(np.asarray(value, np.float32)).astype(dtype) for value in values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_anywhere_is_enough(check, dtype):
    assert check(*tensors([[1.0, -2.0], [3.0, 4.0]], 5.0, [[[6.0]]], dtype=dtype))
    for bad in (np.inf, -np.inf, np.nan):
        assert not check(*tensors([[1.0, -2.0], [3.0, bad]], 5.0, [[[6.0]]], dtype=dtype))
        assert not check(*tensors([[1.0, -2.0], [3.0, 4.0]], bad, [[[6.0]]], dtype=dtype))
        assert not check(*tensors([[1.0, -2.0], [3.0, 4.0]], 5.0, [[[bad]]], dtype=dtype))


def test_mixed_types(check):
    values = ([1.0, 2.0], [3.0], 4.0)
    assert check(*(tensors(value, dtype=dtype)[0] for value, dtype in zip(values, DTYPES)))
    for position in range(3):
        spoilt = list(values)
        spoilt[position] = np.inf
        assert not check(*(tensors(value, dtype=dtype)[0] for value, dtype in zip(spoilt, DTYPES)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_values_are_finite_though_their_sum_is_not(check, dtype):
    largest = 65504.0 if dtype == mstype.float16 else 3.38e38
    assert check(*tensors([[largest] * 8] * 8, [largest] * 8, dtype=dtype))
    assert not check(*tensors([[largest] * 8] * 8, [largest] * 7 + [np.inf], dtype=dtype))


def test_of_a_large_tensor_too(check):
    """Of which only the sum is looked at first."""
    largest = np.full(2**14 + 1, 3e38)
    assert check(*tensors(largest, [1.0]))
    largest[-1] = np.inf
    assert not check(*tensors(largest, [1.0]))


def test_tensors_that_overflow_the_sum_only_together(check):
    assert check(*tensors([3e38], [3e38], [-3e38]))


def test_inf_and_minus_inf_do_not_cancel(check):
    assert not check(*tensors([np.inf, -np.inf]))
    assert not check(*tensors([np.inf], [-np.inf]))


def test_a_list(mode):
    assert bool(all_finite(list(tensors([1.0], [2.0]))))
    assert not bool(all_finite(list(tensors([1.0], [np.nan]))))


def test_no_gradients_are_finite(mode):
    for finite in (all_finite(()), all_finite([]), EmptyAllFinite()()):
        assert finite.dtype == mstype.bool_
        assert finite.shape == ()
        assert bool(finite)
