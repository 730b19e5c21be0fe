"""all_finite: what is finite and what is not, in every form that gradients take."""

import numpy as np
import pytest
from mindspore import ParameterTuple, RowTensor, Tensor, mutable, nn, ops
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
        assert (finite.dtype, finite.shape) == (mstype.bool_, ())
        return bool(finite)

    return checked


def tensors(*values, dtypes):
    return [Tensor(np.asarray(value, np.float32)).astype(dtype) for value, dtype in zip(values, dtypes)]


@pytest.mark.parametrize("dtypes", [*([dtype] * 3 for dtype in DTYPES), DTYPES], ids=["16", "bf16", "32", "mixed"])
def test_one_bad_element_anywhere_is_enough(check, dtypes):
    values = [[[1.0, -2.0], [3.0, 4.0]], 5.0, [[[6.0]]]]
    assert check(*tensors(*values, dtypes=dtypes))
    for bad in (np.inf, -np.inf, np.nan):
        for i, spoilt in enumerate(([[1.0, -2.0], [3.0, bad]], bad, [[[bad]]])):
            assert not check(*tensors(*[*values[:i], spoilt, *values[i + 1 :]], dtypes=dtypes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_values_are_finite_though_their_sum_is_not(check, dtype):
    largest = 65504.0 if dtype == mstype.float16 else 3.38e38
    assert check(*tensors([[largest] * 8] * 8, [largest] * 8, dtypes=[dtype] * 2))
    assert not check(*tensors([[largest] * 8] * 8, [largest] * 7 + [np.inf], dtypes=[dtype] * 2))


def test_sums_that_overflow_and_infinities_that_cancel(check):
    def holds(*values):
        return check(*tensors(*values, dtypes=[mstype.float32] * 3))

    # Of a large Tensor only the sum is looked at first.
    largest = np.full(2**14 + 1, 3e38)
    assert holds(largest, [1.0])
    largest[-1] = np.inf
    assert not holds(largest, [1.0])
    assert holds([3e38], [3e38], [-3e38])
    assert not holds([np.inf, -np.inf])
    assert not holds([np.inf], [-np.inf])


def test_a_list_and_no_gradients(mode):
    for last, expected in ((2.0, True), (np.nan, False)):
        assert bool(all_finite(tensors([1.0], [last], dtypes=DTYPES[2:] * 2))) == expected
    for finite in (all_finite(()), all_finite([]), EmptyAllFinite()()):
        assert (finite.dtype, finite.shape, bool(finite)) == (mstype.bool_, (), True)


class SparseStep(nn.Cell):
    """A hand-written step on a table of which compiled code takes the gradient as a RowTensor."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingLookup(6, 2, sparse=True)
        self.dense = nn.Dense(2, 1)
        weights = ParameterTuple(self.table.trainable_params() + self.dense.trainable_params())
        self.gradients_of = ops.value_and_grad(self.loss, None, weights)

    def loss(self, rows, factor):
        return (self.dense(self.table(rows)) * factor).sum()

    def construct(self, rows, factor):
        _, grads = self.gradients_of(rows, factor)
        return all_finite(grads), all_finite(grads[:1])


def test_gradients_of_few_rows(mode):
    step = SparseStep()
    for factor, expected in ((1.0, True), (np.inf, False), (np.nan, False)):
        assert [bool(its) for its in step(Tensor([0, 1]), Tensor(factor, mstype.float32))] == [expected] * 2


def test_rows_outside_of_compiled_code(mode):
    for value in (1.0, np.inf):
        rows = RowTensor(Tensor([0, 5]), Tensor([[1.0], [value]], mstype.float32), (6, 1))
        assert bool(all_finite([rows, Tensor([1.0])])) == np.isfinite(value)
