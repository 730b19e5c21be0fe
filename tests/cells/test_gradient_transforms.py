"""What a user's own cells make of the gradients before they are measured and judged: centralized ones, noisy ones."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.training import by_sgd, state

import ms_lossscale as ls

SLOPE, CENTRALIZED = np.float32([1, 2, 6]), np.float32([-2, -1, 3])


class Sloped(nn.Cell):
    """The gradient of its matrix's rows and of its biases, which were stacked, is a slope times a sign, in float16."""

    def __init__(self, name="net", sign=1):
        super().__init__()
        self.sign = sign
        shapes = {"matrix": (2, 3), **{f"bias_{i}": (3,) for i in range(4)}}
        for attribute, shape in shapes.items():
            setattr(self, attribute, Parameter(Tensor(np.zeros(shape, np.float32)), name=f"{name}.{attribute}"))

    def construct(self, slope):
        slope = self.sign * slope.astype(mstype.float16)
        biases = self.bias_0 + self.bias_1 + self.bias_2 + self.bias_3
        return sum_of_product(self.matrix, slope) + sum_of_product(biases, slope)


def sum_of_product(weight, slope):
    return (weight.astype(mstype.float16) * slope).astype(mstype.float32).sum()


class Centralize(nn.Cell):  # Gradient centralization: subtracts the mean of each row of a matrix.
    def construct(self, grads):
        centralized = ()
        for grad in grads:
            if grad.ndim > 1:
                grad = grad - grad.mean(-1, keep_dims=True)
            centralized += (grad,)
        return centralized


class Counted(nn.Cell):  # Adds to each gradient, in the place of noise, how often it was called.
    def __init__(self):
        super().__init__()
        self.calls = Parameter(Tensor(0.0, mstype.float32), name="calls", requires_grad=False)
        self.one = Tensor(1.0, mstype.float32)

    def construct(self, grads):
        ops.assign(self.calls, self.calls + self.one)
        noisy = ()
        for grad in grads:
            noisy += (grad + self.calls,)
        return noisy


def two(kind, loss_scale, **keywords):
    return by_sgd([Sloped("first"), Sloped("second", -1)], loss_scale, 1.0, kind, **keywords)


def slopes(factor=1.0):
    return Tensor(np.float32(factor) * SLOPE)


def assert_moved(cell, name, matrix, bias):
    """Asserts by which gradients, in all, the rows of the matrix and the biases of a network have moved."""
    values = state(cell)
    np.testing.assert_array_equal(values[f"{name}.matrix"], np.broadcast_to(-np.float32(matrix), (2, 3)))
    for i in range(4):
        np.testing.assert_array_equal(values[f"{name}.bias_{i}"], -np.float32(bias))


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
def test_each_network_may_have_its_own_in_their_order_before_the_norm(mode, kind):
    transforms = [[Counted(), Centralize()], [Centralize(), Counted()]]
    one_for_all = two(kind, 8.0, gradient_transforms=[Centralize()])
    cell = two(kind, ls.DynamicLossScale(2.0**10), gradient_transforms=transforms, clip_norm=float("inf"))
    assert {"network_0.calls", "network_1.calls"} <= cell.parameters_dict().keys()
    assert any(name.endswith("calls") for name in cell.forward_state_names())
    one_for_all(slopes())
    assert_moved(one_for_all, "first", CENTRALIZED, SLOPE)
    assert_moved(one_for_all, "second", -CENTRALIZED, -SLOPE)
    cell(slopes())
    assert_moved(cell, "first", CENTRALIZED, SLOPE + 1)
    assert_moved(cell, "second", 1 - CENTRALIZED, 1 - SLOPE)
    moved = (CENTRALIZED, SLOPE + 1), (1 - CENTRALIZED, 1 - SLOPE)
    norms = [np.sqrt(2 * np.sum(matrix**2) + 4 * np.sum(bias**2)) for matrix, bias in moved]
    np.testing.assert_allclose(cell.grad_norm(), norms, rtol=1e-6)


class Smoothed(ls.DynamicLossScale):
    """Counts with a Parameter of its own, and has a mean of norms, which a transform that holds this scale writes."""

    def __init__(self, scale):
        super().__init__(scale)
        self.norm = Parameter(Tensor(1.0), name="smoothed.norm", requires_grad=False)
        self.asked = Parameter(Tensor(0.0), name="smoothed.asked", requires_grad=False)
        self.one = Tensor(1.0, mstype.float32)

    def next_scale(self, loss_scale, overflow):
        overflow = ops.depend(overflow, ops.assign_add(self.asked, self.one))
        return super().next_scale(loss_scale, overflow)


class Measures(nn.Cell):  # Leaves the gradients as they are, and writes to a loss scale that it holds.
    def __init__(self, loss_scale):
        super().__init__()
        self.loss_scale = loss_scale

    def construct(self, grads):
        ops.assign(self.loss_scale.norm, ops.ReduceMax()(grads[0]))
        return grads


@quick_in_pynative_mode
def test_an_update_rule_goes_on_though_a_transform_holds_it(mode):
    rule = Smoothed(2.0**10)
    cell = by_sgd(Sloped(), rule, 1.0, gradient_transforms=[Measures(rule)])
    cell(slopes())
    for scale in (2.0**10, 2.0**9):
        assert float(cell(slopes(np.inf))[2]) == scale
    # A loss scale is not restored, whatever writes it.
    assert (cell.get_loss_scale(), float(rule.norm), float(rule.asked)) == (2.0**8, np.inf, 3.0)


class Huge(nn.Cell):  # Makes the first gradient too large.
    def __init__(self):
        super().__init__()
        self.factor = Tensor(1e38, mstype.float32)

    def construct(self, grads):
        return (grads[0] * self.factor, *grads[1:])


@quick_in_pynative_mode
def test_the_overflow_check_is_on_what_they_return_and_the_scale_moves_whose_gradients_they_make_infinite(mode):
    scales = [ls.DynamicLossScale(8.0), ls.DynamicLossScale(8.0)]
    cell = two("simultaneous", scales, gradient_transforms=[[], (Huge(),)], clip_norm=[None, 1.0])
    assert bool(cell(slopes())[1])
    assert cell.overflowed_parameters() == ["second.matrix"]
    assert cell.get_loss_scale() == [8.0, 4.0]
    for name in ("first", "second"):
        assert_moved(cell, name, 0 * SLOPE, 0 * SLOPE)


class KeepsSum(nn.Cell):
    def __init__(self):
        super().__init__()
        self.last = Parameter(Tensor(0.0, mstype.float32), name="last", requires_grad=False)

    def construct(self, grads):
        ops.assign(self.last, grads[0].sum())
        return grads


def test_a_skipped_flush_undoes_what_one_of_several_networks_wrote(mode):
    kept = KeepsSum()
    cell = two("alternating", ls.DynamicLossScale(), gradient_transforms=[kept], gradient_accumulation_steps=2)
    cell(slopes(np.inf))
    cell.flush()
    assert [counters["skipped_steps"] for counters in cell.counters()] == [1, 1]
    assert kept.last.asnumpy() == 0
