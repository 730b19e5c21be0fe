"""Checks loss scales against numbers computed elsewhere, and gradients against NumPy in float64."""

import numpy as np
from mindspore import Tensor

from ms_lossscale import DynamicLossScale, FixedLossScale, ScheduledLossScale
from ms_lossscale.selfcheck import networks as nets
from ms_lossscale.selfcheck.claim import check, expect, expect_equal


def _expect_scales(loss_scale, overflows, expected):
    scales = []
    for overflow in overflows:
        loss_scale.adjust(grads_finite=Tensor(not overflow))
        scales.append(loss_scale.get_loss_scale())
    expect_equal(scales, expected, f"the scales of a {type(loss_scale).__name__} after each step")


@check(quick=True)
def a_dynamic_scale_moves_as_that_of_others(device):
    """A DynamicLossScale grows and backs off as PyTorch's GradScaler does."""
    overflows = [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    # The scales of torch.amp.GradScaler 2.13 on CPU.
    expected = [64, 32, 32, 16, 16, 16, 8, 8, 4, 4, 2, 1, 1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1]
    _expect_scales(DynamicLossScale(64.0, scale_window=3, min_loss_scale=2.0**-20), overflows, expected)


@check()
def a_dynamic_scale_keeps_its_bounds(device):
    """A DynamicLossScale stops at its floor and at its ceiling."""
    _expect_scales(DynamicLossScale(2.0, scale_window=1, max_loss_scale=4.0), [1, 1, 0, 0, 0, 1], [1, 1, 2, 4, 4, 2])


@check()
def hysteresis_waits(device):
    """With hysteresis=2 a DynamicLossScale backs off at the second overflow in a row."""
    _expect_scales(DynamicLossScale(8.0, scale_window=2, hysteresis=2), [1, 0, 1, 1, 0, 0, 1], [8, 8, 8, 4, 4, 8, 8])


@check()
def fixed_and_scheduled_scales_ignore_overflows(device):
    """A FixedLossScale stays, and a ScheduledLossScale changes at its milestones, whatever overflows."""
    _expect_scales(FixedLossScale(128.0), [0, 1, 0, 1, 1, 0], [128.0] * 6)
    _expect_scales(ScheduledLossScale([2, 5], [1024.0, 16.0]), [0, 1, 0, 1, 1, 0], [1024.0] + [16.0] * 5)


def _expect_close(actual, expected, what, tolerance=1e-5):
    # Each operation in float32 rounds values of about 1 by 2**-24.
    difference = np.abs(actual - expected).max()
    expect(difference <= tolerance, f"{what} is off by {difference:.2g}, more than {tolerance:.2g}, from NumPy's")


def _expect_updates(cell, changed=lambda gradient: gradient, calls=1):
    """Makes three steps of a cell and in NumPy, which changes a gradient as the cell should, and expects the same."""
    (parameter,), velocity, gradients = cell.optimizer.parameters, 0.0, []
    weight = parameter.asnumpy().astype(np.float64)
    for call in range(3 * calls):
        x, y = nets.linear_batch(call)
        cell(x, y)
        gradients.append(2 / len(x) * (x.asnumpy() @ weight.T - y.asnumpy()).T @ x.asnumpy())
        if len(gradients) == calls:
            velocity, gradients = nets.MOMENTUM * velocity + changed(sum(gradients) / calls), []
            weight = weight - nets.LEARNING_RATE * nets.DECAY ** (call // calls) * velocity
        _expect_close(parameter.asnumpy(), weight, f"the weight after call {call}")


@check(quick=True)
def gradients_are_divided_by_the_scale(device):
    """The update does not depend on the loss scale: gradients are divided by it before the optimizer."""
    for loss_scale in (2.0**10, 1000.0):
        _expect_updates(nets.linear_cell(99, loss_scale))


@check()
def float16_gradients_are_divided_in_float32(device):
    """float16 gradients are divided in float32: what underflows in float16 without a loss scale is kept."""
    gradient = np.full(4, 1e-7 * 2**12, np.float16)
    unscaled = FixedLossScale(2.0**12).unscale(Tensor(gradient)).asnumpy().tolist()
    expect_equal(unscaled, (gradient.astype(np.float64) / 2**12).tolist(), "gradients of 1e-7")


@check()
def clipping_takes_the_norm_of_unscaled_gradients(device):
    """With clip_norm the unscaled gradients are clipped by their global norm, as in NumPy."""
    cell = nets.linear_cell(99, 2.0**10, clip_norm=0.5)

    def clipped(gradient):
        norm = np.linalg.norm(gradient)
        _expect_close(cell.grad_norm(), norm, "the norm", 1e-5 * norm)
        return gradient * min(1.0, 0.5 / norm)

    _expect_updates(cell, clipped)


@check()
def accumulated_gradients_are_averaged(device):
    """With accumulation the update is that of the mean of the cycle's gradients, and comes at its last call."""
    _expect_updates(nets.linear_cell(99, 2.0**10, gradient_accumulation_steps=3), calls=3)


@check()
def averages_follow_the_weights(device):
    """The moving average begins at the first weights and moves by the decay after each update."""
    cell = nets.linear_cell(99, 2.0**10, ema_decay=0.75)
    average = cell.optimizer.parameters[0].asnumpy().copy()
    for seed in range(3):
        cell(*nets.linear_batch(seed))
        average = 0.75 * average + 0.25 * cell.optimizer.parameters[0].asnumpy()
    _expect_close(cell.ema_parameters()["weight"].asnumpy(), average, "the average")
