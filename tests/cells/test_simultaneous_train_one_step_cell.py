"""
SimultaneousTrainOneStepCell: one overflow check and one update for several networks.

The oracle is MindSpore's own differentiation of each loss alone, followed by the stock optimizers. The GAN is trained
once for each form and mode; most tests read what was recorded then.
"""

import functools

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import dtype as mstype
from mindspore import nn
from support.gan_networks import (
    NETWORK_INPUTS,
    Counted,
    GanLosses,
    TupleOf,
    gan_batch,
    generator_and_discriminator,
    renamed,
    take,
    two_losses,
    two_optimizers,
)
from support.networks import LossOfShape, Mlp, batch, batch_for
from support.training import bookkeeping, changed, same_bits, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

# For each step the losses that overflow: clean steps before, between and after, and each loss alone and both.
OVERFLOWS = [(), (), (0,), (), (1,), (0, 1), ()]

FORMS = ["list", "tuple"]


def loss_scale():
    """A power of two, which is exact, and moves both ways within the steps above."""
    return DynamicLossScale(2.0**10, scale_window=2)


def gan_cell(form, generator, discriminator):
    """The cell in one of its forms."""
    one_tuple = form == "tuple"
    return SimultaneousTrainOneStepCell(
        GanLosses(generator, discriminator) if one_tuple else two_losses(generator, discriminator),
        two_optimizers(generator, discriminator),
        loss_scale(),
        network_inputs=None if one_tuple else NETWORK_INPUTS,
    ).set_train()


def as_numpy(outputs):
    return [output.asnumpy() for output in outputs]


def weights_in(values):
    """Of a state, the weights: no optimizer state, no statistics, no bookkeeping."""
    return {
        name: value
        for name, value in values.items()
        if name.startswith(("generator.", "discriminator.")) and "moving" not in name
    }


class Recorded:
    """What a cell returned and held in the steps above."""

    def __init__(self, form):
        generator, discriminator = generator_and_discriminator()
        counted = Counted(generator)
        self.cell = gan_cell(form, counted, discriminator)
        self.states, self.tensors, self.outputs, self.runs = [state(self.cell)], [], [], []
        for step, overflows in enumerate(OVERFLOWS):
            outputs = self.cell(*gan_batch(seed=step, overflow_in=overflows))
            self.tensors.append(outputs)
            self.outputs.append(as_numpy(outputs))
            self.states.append(state(self.cell))
            self.runs.append(counted.runs)


@functools.cache
def recorded(form, mode):
    return Recorded(form)


@functools.cache
def forward_by_hand(form, mode):
    """The losses of the list's cells in turn, or of the one network, and the statistics that BatchNorm has then."""
    networks, inputs = generator_and_discriminator(), gan_batch()
    if form == "tuple":
        losses = as_numpy(GanLosses(*networks).set_train()(*inputs))
    else:
        losses = [
            loss.set_train()(*take(positions, inputs)).asnumpy()
            for loss, positions in zip(two_losses(*networks), NETWORK_INPUTS)
        ]
    return losses, {p.name: p.asnumpy() for n in networks for p in n.get_parameters() if "moving" in p.name}


@functools.cache
def weights_by_hand(mode):
    """After each step: both gradients at the same weights, each by mindspore.grad alone, then both optimizers."""
    networks = generator_and_discriminator()
    losses, optimizers = two_losses(*networks), two_optimizers(*networks)
    gradients = [mindspore.grad(loss, None, optimizer.parameters) for loss, optimizer in zip(losses, optimizers)]
    after = []
    for step, overflows in enumerate(OVERFLOWS):
        if not overflows:
            inputs = gan_batch(seed=step)
            both = [gradient(*take(positions, inputs)) for gradient, positions in zip(gradients, NETWORK_INPUTS)]
            for optimizer, its_gradients in zip(optimizers, both):
                optimizer(its_gradients)
        after.append({p.name: p.asnumpy().copy() for network in networks for p in network.trainable_params()})
    return after


# Each mode and each form is in one of the quick tests; that both forms and modes train alike is in the long ones.
@pytest.mark.parametrize(
    ("mode", "form"),
    [("graph", "list"), ("pynative", "tuple"), *slow(("graph", "tuple"), ("pynative", "list"))],
    indirect=["mode"],
)
class TestGan:
    def test_loss_i_trains_the_weights_of_optimizer_i_only(self, mode, form):
        """The generator's loss goes through the discriminator, and the discriminator's comes from the generator."""
        expected = weights_by_hand(mode)
        for step, values in enumerate(recorded(form, mode).states[1:]):
            assert not changed(weights_in(values), expected[step]), f"after step {step}"
        # All of them are trained.
        assert changed(weights_in(recorded(form, mode).states[0]), expected[-1]) == set(expected[-1])

    def test_a_skipped_step_moves_nothing_but_the_scale_and_the_counters(self, mode, form):
        """No weight, optimizer state or BatchNorm statistic of either network, whichever of them overflowed."""
        states = recorded(form, mode).states
        for overflows, before, after in zip(OVERFLOWS, states, states[1:]):
            moved = changed(before, after)
            if overflows:
                assert moved == bookkeeping(moved)
                assert "step_counters.skipped_steps" in moved
            else:
                # Weights, moments, the optimizers' step numbers and the statistics of both.
                assert moved >= set(weights_in(before)) | {
                    "generator.norm.moving_mean",
                    "generator.norm.moving_variance",
                    "discriminator.norm.moving_mean",
                    "discriminator.norm.moving_variance",
                    "optimizer_0.global_step",
                    "optimizer_1.global_step",
                    "optimizer_0.moment1.generator.weight",
                    "optimizer_1.moments.discriminator.weight",
                }

    def test_outputs_have_the_documented_types(self, mode, form):
        for outputs in recorded(form, mode).tensors:
            assert [(output.dtype, output.shape) for output in outputs] == [
                (mstype.float32, ()),
                (mstype.bool_, ()),
                (mstype.float32, ()),
                (mstype.float32, (2,)),
            ]

    def test_losses_are_those_of_the_weights_before_the_step(self, mode, form):
        expected, _ = forward_by_hand(form, mode)
        loss, _, _, losses = recorded(form, mode).outputs[0]
        np.testing.assert_array_equal(losses, expected)
        # In float32: a sum() from 0 has float64 with NumPy 1.
        assert loss == expected[0] + expected[1]

    def test_batch_norm_is_updated_once_for_each_forward(self, mode, form):
        _, statistics = forward_by_hand(form, mode)
        assert len(statistics) == 4
        for name, expected in statistics.items():
            np.testing.assert_array_equal(recorded(form, mode).states[1][name], expected, err_msg=name)


class TestForms:
    @quick_in_graph_mode
    def test_the_tuple_does_shared_work_once(self, mode):
        assert recorded("tuple", mode).runs == [1, 2, 3, 4, 5, 6, 7]


class TestOneNetwork:
    @quick_in_pynative_mode
    def test_is_the_cell_for_one_network(self, mode):
        cells = []
        for make in (
            lambda network, optimizer: SimultaneousTrainOneStepCell([network], [optimizer], loss_scale()),
            lambda network, optimizer: ScaledTrainOneStepCell(network, optimizer, loss_scale()),
        ):
            network = Mlp()
            cells.append(make(network, nn.Adam(network.trainable_params(), learning_rate=0.05)).set_train())
        simultaneous, scaled = cells
        for step, overflows in enumerate(OVERFLOWS):
            inputs = batch_for(bool(overflows), seed=step)
            *together, losses = as_numpy(simultaneous(*inputs))
            alone = as_numpy(scaled(*inputs))
            assert all(same_bits(*pair) for pair in zip(together, alone))
            assert same_bits(losses, alone[0].reshape(1))
            assert not changed(state(simultaneous), state(scaled))
        assert simultaneous.get_loss_scale() == scaled.get_loss_scale()
        assert simultaneous.counters() == scaled.counters()
        assert scaled.counters() == {"applied_steps": 4, "skipped_steps": 3, "consecutive_skipped_steps": 0}


def sgd(networks):
    return [nn.SGD(network.trainable_params(), learning_rate=0.01) for network in networks]


def assert_one_step_of_sgd(network, start, gradient):
    np.testing.assert_allclose(network.weight.asnumpy(), start - 0.01 * gradient, rtol=1e-5, atol=1e-6)


def errors_of(network, x, y):
    """The control of `Linear` and `LossOfShape`, in float64: the errors, and the gradient of the sum of squares."""
    x, y, start = (tensor.asnumpy().astype(np.float64) for tensor in (x, y, network.weight))
    errors = x @ start - y
    return errors, 2 * x.T @ errors, start


@quick_in_pynative_mode
@pytest.mark.parametrize("form", FORMS)
def test_three_networks_with_losses_of_any_shape(mode, form):
    """As in stock MindSpore, the sum of a loss is what is trained."""
    networks = [renamed(f"{i}.", LossOfShape(shape)) for i, shape in enumerate([(), (1,), (4, 1)])]
    cell = SimultaneousTrainOneStepCell(
        TupleOf(*networks) if form == "tuple" else networks, sgd(networks), 2.0**10
    ).set_train()
    for step, overflow in enumerate((False, True, False)):
        inputs = batch_for(overflow, seed=step)
        controls = [errors_of(network, *inputs) for network in networks]
        loss, reported, _, losses = as_numpy(cell(*inputs))
        assert bool(reported) is overflow
        if overflow:
            for network, (_, _, start) in zip(networks, controls):
                np.testing.assert_array_equal(network.weight.asnumpy(), start)
        else:
            np.testing.assert_allclose(losses, [np.square(errors).sum() for errors, _, _ in controls], rtol=1e-5)
            np.testing.assert_allclose(loss, losses.sum(dtype=np.float64), rtol=1e-6)
            for network, (_, gradient, start) in zip(networks, controls):
                assert_one_step_of_sgd(network, start, gradient)
    assert cell.counters() == {"applied_steps": 2, "skipped_steps": 1, "consecutive_skipped_steps": 0}


@quick_in_pynative_mode
def test_each_network_takes_the_inputs_at_its_positions(mode):
    """In any order, and one input may serve several networks."""
    networks = [renamed(f"{i}.", LossOfShape(())) for i in range(2)]
    cell = SimultaneousTrainOneStepCell(networks, sgd(networks), network_inputs=[(2, 0), [1, 0]]).set_train()
    (x, y), (other_x, _) = batch(0), batch(1)
    controls = [errors_of(networks[0], x, y), errors_of(networks[1], other_x, y)]
    cell(y, other_x, x)
    for network, (_, gradient, start) in zip(networks, controls):
        assert_one_step_of_sgd(network, start, gradient)
