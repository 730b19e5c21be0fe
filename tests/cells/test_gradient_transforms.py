"""What a user's own cells make of the gradients before they are measured and judged: centralized ones, noisy ones."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.training import changed, state

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
    build_train_network,
)

SLOPE = np.float32([1, 2, 6])
CENTRALIZED = np.float32([-2, -1, 3])


class Sloped(nn.Cell):
    """
    The gradient of its matrix's rows, and of its biases, is `slope` times a sign, in float16. So many biases were
    stacked.
    """

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


class Centralize(nn.Cell):
    """Gradient centralization: subtracts the mean of each row of a matrix."""

    def construct(self, grads):
        centralized = ()
        for grad in grads:
            if grad.ndim > 1:
                grad = grad - grad.mean(-1, keep_dims=True)
            centralized += (grad,)
        return centralized


class Counted(nn.Cell):
    """Adds to each gradient, in the place of noise, how often it was called."""

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


def make(kind, transforms, scale=2.0**10, loss_scale=None, **keywords):
    """A cell of one network, or of two with opposite gradients, that descends by them."""
    networks = [Sloped()] if kind == "scaled" else [Sloped("first"), Sloped("second", -1)]
    optimizers = [nn.SGD(network.trainable_params(), 1.0) for network in networks]
    keywords["gradient_transforms"] = transforms
    loss_scale = loss_scale or DynamicLossScale(scale)
    if kind == "scaled":
        return ScaledTrainOneStepCell(networks[0], optimizers[0], loss_scale, **keywords).set_train()
    cell = SimultaneousTrainOneStepCell if kind == "simultaneous" else AlternatingTrainOneStepCell
    return cell(networks, optimizers, loss_scale, **keywords).set_train()


_OF_BOTH = {"first": 1, "second": -1}
SIGNS = {"scaled": {"net": 1}, "simultaneous": _OF_BOTH, "alternating": _OF_BOTH}


def slopes(factor=1.0):
    return Tensor(np.float32(factor) * SLOPE)


def assert_moved(cell, name, matrix, bias):
    """Asserts by which gradients, in all, the rows of the matrix and the biases of a network have moved."""
    values = state(cell)
    np.testing.assert_array_equal(values[f"{name}.matrix"], np.broadcast_to(-np.float32(matrix), (2, 3)))
    for i in range(4):
        np.testing.assert_array_equal(values[f"{name}.bias_{i}"], -np.float32(bias))


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["scaled", "simultaneous", "alternating"])
def test_each_weight_has_its_own_gradient_and_the_norm_is_that_of_the_transformed_ones(mode, kind):
    cell = make(kind, [Centralize()], clip_norm=float("inf"))
    cell(slopes())
    norm = np.sqrt(2 * np.sum(CENTRALIZED**2) + 4 * np.sum(SLOPE**2))
    np.testing.assert_allclose(cell.grad_norm(), norm if kind == "scaled" else [norm, norm], rtol=1e-6)
    for name, sign in SIGNS[kind].items():
        assert_moved(cell, name, sign * CENTRALIZED, sign * SLOPE)


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
def test_each_network_may_have_its_own_in_their_order(mode, kind):
    cell = make(kind, [[Counted(), Centralize()], [Centralize(), Counted()]])
    names = cell.parameters_dict()
    assert "network_0.calls" in names and "network_1.calls" in names
    cell(slopes())
    assert_moved(cell, "first", CENTRALIZED, SLOPE + 1)
    assert_moved(cell, "second", 1 - CENTRALIZED, 1 - SLOPE)


@quick_in_pynative_mode
def test_a_skipped_step_takes_back_what_they_write(mode):
    cell = make("scaled", [Counted()])
    cell(slopes())
    before = state(cell)
    assert bool(cell(slopes(np.inf))[1])
    assert {name.split(".")[0] for name in changed(before, state(cell))} == {"loss_scale", "step_counters"}
    cell(slopes())
    assert_moved(cell, "net", 2 * SLOPE + 3, 2 * SLOPE + 3)
    assert "calls" in cell.forward_state_names()


class Smoothed(DynamicLossScale):
    """Counts with a Parameter of its own, and has a mean of norms, which a transform that holds this scale writes."""

    def __init__(self, scale):
        super().__init__(scale)
        self.norm = Parameter(Tensor(1.0), name="smoothed.norm", requires_grad=False)
        self.asked = Parameter(Tensor(0.0), name="smoothed.asked", requires_grad=False)
        self.one = Tensor(1.0, mstype.float32)

    def next_scale(self, loss_scale, overflow):
        overflow = ops.depend(overflow, ops.assign_add(self.asked, self.one))
        return super().next_scale(loss_scale, overflow)


class Watches(nn.Cell):
    """Leaves the gradients as they are, and holds a loss scale."""

    def __init__(self, loss_scale):
        super().__init__()
        self.loss_scale = loss_scale

    def construct(self, grads):
        return grads


class Measures(Watches):
    def construct(self, grads):
        ops.assign(self.loss_scale.norm, ops.ReduceMax()(grads[0]))
        return grads


@quick_in_pynative_mode
@pytest.mark.parametrize("loss_scale, transform", [(DynamicLossScale, Watches), (Smoothed, Measures)])
def test_an_update_rule_goes_on_though_a_transform_holds_it(mode, loss_scale, transform):
    loss_scale = loss_scale(2.0**10)
    cell = make("scaled", [transform(loss_scale)], loss_scale=loss_scale)
    cell(slopes())
    for scale in (2.0**10, 2.0**9):
        assert float(cell(slopes(np.inf))[2]) == scale
    assert cell.get_loss_scale() == 2.0**8
    if transform is Measures:
        # A loss scale is not restored, whatever writes it.
        assert (float(loss_scale.norm), float(loss_scale.asked)) == (np.inf, 3.0)


class Huge(nn.Cell):
    """Makes the first gradient too large."""

    def __init__(self):
        super().__init__()
        self.factor = Tensor(1e38, mstype.float32)

    def construct(self, grads):
        return (grads[0] * self.factor, *grads[1:])


@quick_in_pynative_mode
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_the_overflow_check_is_on_what_they_return(mode, clip_norm):
    network = Sloped()
    # Through the drop-in, which takes the keyword, too.
    cell = build_train_network(
        network,
        nn.SGD(network.trainable_params(), 1.0),
        loss_scale_manager=DynamicLossScale(1024),
        gradient_transforms=(Huge(),),
        clip_norm=clip_norm,
    )
    assert bool(cell(slopes())[1])
    assert cell.overflowed_parameters() == ["net.matrix"]
    assert_moved(cell, "net", 0 * SLOPE, 0 * SLOPE)


@quick_in_pynative_mode
def test_of_several_scales_the_one_moves_whose_gradients_they_make_infinite(mode):
    scales = [DynamicLossScale(8.0), DynamicLossScale(8.0)]
    cell = make("simultaneous", [[], [Huge()]], loss_scale=scales)
    cell(slopes())
    assert cell.get_loss_scale() == [8.0, 4.0]
