"""
AlternatingTrainOneStepCell: each network makes its whole step, with its own scale, overflow check and counters.

The oracle are MindSpore's unscaled TrainOneStepCells, called one after the other. The GAN is trained once in each mode;
several tests read what was recorded then.
"""

import functools

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import dtype as mstype
from mindspore import nn
from support.gan_networks import (
    NETWORK_INPUTS,
    ClipWeights,
    WithAux,
    gan_batch,
    generator_and_discriminator,
    renamed,
    take,
    two_losses,
    two_optimizers,
)
from support.networks import Linear, batch, overflowing_batch
from support.training import OneForward, changed, same_bits, state

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, SimultaneousTrainOneStepCell

# For each call the networks that overflow.
OVERFLOWS = [(), (), (0,), (), (1,), (0, 1), (1,)]


def as_numpy(outputs):
    return [output.asnumpy() for output in outputs]


def gan_cell():
    networks = generator_and_discriminator()
    return AlternatingTrainOneStepCell(
        two_losses(*networks),
        two_optimizers(*networks),
        DynamicLossScale(2.0**10, scale_window=2),
        network_inputs=NETWORK_INPUTS,
    ).set_train()


class Recorded:
    """What the cell returned and held in the calls above."""

    def __init__(self):
        self.cell = gan_cell()
        self.states, self.tensors, self.outputs = [state(self.cell)], [], []
        for call, overflows in enumerate(OVERFLOWS):
            outputs = self.cell(*gan_batch(seed=call, overflow_in=overflows))
            self.tensors.append(outputs)
            self.outputs.append(as_numpy(outputs))
            self.states.append(state(self.cell))


@functools.cache
def recorded(mode):
    return Recorded()


@functools.cache
def stock(mode):
    """
    For each call the losses, and what both networks and optimizers hold after it, of two unscaled cells.

    A step that overflows is simply not made: that is what a transaction leaves behind.
    """
    networks = generator_and_discriminator()
    cells = [OneForward(*pair).set_train() for pair in zip(two_losses(*networks), two_optimizers(*networks))]
    losses, states = [], []
    for call, overflows in enumerate(OVERFLOWS):
        inputs = gan_batch(seed=call)
        losses.append(
            [
                None if i in overflows else cells[i](*take(NETWORK_INPUTS[i], inputs)).asnumpy()
                for i in range(len(cells))
            ]
        )
        held = {parameter.name: parameter.asnumpy().copy() for n in networks for parameter in n.get_parameters()}
        for i, cell in enumerate(cells):
            own = [parameter for parameter in cell.optimizer.get_parameters() if parameter.name not in held]
            held.update({f"optimizer_{i}.{parameter.name}": parameter.asnumpy().copy() for parameter in own})
        states.append(held)
    return losses, states


@quick_in_graph_mode
class TestGan:
    def test_is_two_stock_cells_one_after_the_other(self, mode):
        """
        Weights, optimizer states and BatchNorm statistics. Where one network overflowed, only its step is undone, and
        the other's is the stock one.
        """
        _, expected = stock(mode)
        for call, values in enumerate(recorded(mode).states[1:]):
            held = {name: value for name, value in values.items() if name in expected[call]}
            assert not changed(held, expected[call]), f"after call {call}"

    def test_network_1_sees_the_new_weights_of_network_0(self, mode):
        """Its loss is the stock cell's after network 0's step, and not the one at the weights before."""
        losses, _ = stock(mode)
        first = recorded(mode).outputs[0][3]
        np.testing.assert_array_equal(first, losses[0])
        before = two_losses(*generator_and_discriminator())[1].set_train()(*take(NETWORK_INPUTS[1], gan_batch()))
        assert abs(first[1] - before.asnumpy()) > 1e-3

    def test_outputs_have_the_documented_types(self, mode):
        for outputs in recorded(mode).tensors:
            assert [(output.dtype, output.shape) for output in outputs] == [
                (mstype.float32, ()),
                (mstype.bool_, (2,)),
                (mstype.float32, (2,)),
                (mstype.float32, (2,)),
            ]
        for loss, _, _, losses in recorded(mode).outputs:
            np.testing.assert_allclose(loss, losses.sum(), rtol=1e-6)


def linear_pair():
    return [renamed(f"{i}.", Linear(seed=i)) for i in range(2)]


def sgd(networks):
    return [nn.SGD(network.trainable_params(), learning_rate=0.1) for network in networks]


# What each network takes of (x_0, y_0, x_1, y_1).
PAIRS = [(0, 1), (2, 3)]


def pair_batch(call, overflow_in=()):
    return [
        tensor for i in range(2) for tensor in (overflowing_batch if i in overflow_in else batch)(seed=2 * call + i)
    ]


class TestOneForEach:
    @quick_in_pynative_mode
    def test_one_loss_scale_is_copied_for_each(self, mode):
        networks = linear_pair()
        loss_scale = DynamicLossScale(2.0**10)
        cell = AlternatingTrainOneStepCell(networks, sgd(networks), loss_scale, network_inputs=PAIRS).set_train()
        cell(*pair_batch(0, overflow_in=(1,)))
        assert cell.get_loss_scale() == [1024.0, 512.0]
        assert loss_scale.get_loss_scale() == 1024.0

    @quick_in_pynative_mode
    @pytest.mark.parametrize("which", [(1,), None])
    def test_after_update_runs_after_each_applied_update_of_its_network(self, mode, which):
        networks, unclipped = linear_pair(), linear_pair()
        bound = 0.25
        clips = [ClipWeights(network.trainable_params(), bound) for network in networks]
        if which is None:
            # One for all: here it clips network 0 after each update of either network.
            after_update, which = clips[0], (0,)
        else:
            after_update = [clip if i in which else None for i, clip in enumerate(clips)]
        cell = AlternatingTrainOneStepCell(
            networks, sgd(networks), 2.0**10, after_update=after_update, network_inputs=PAIRS
        ).set_train()
        before = state(cell)
        cell(*pair_batch(0, overflow_in=(0, 1)))
        # Not in a skipped step.
        assert not {name for name in changed(before, state(cell)) if name.endswith("weight")}
        cell(*pair_batch(1))
        for i in range(2):
            nn.TrainOneStepCell(unclipped[i], sgd(unclipped)[i]).set_train()(*take(PAIRS[i], pair_batch(1)))
            expected = unclipped[i].weight.asnumpy()
            assert np.abs(expected).max() > bound
            if i in which:
                expected = np.clip(expected, -bound, bound)
            assert same_bits(networks[i].weight.asnumpy(), expected)


@quick_in_pynative_mode
@pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])
@pytest.mark.parametrize("max_retries", [0, 1])
def test_aux_of_one_of_the_networks(mode, make, max_retries):
    networks = linear_pair()
    cell = make(
        [networks[0], WithAux(networks[1])],
        sgd(networks),
        DynamicLossScale(2.0**10),
        has_aux=[False, True],
        network_inputs=PAIRS,
        max_retries=max_retries,
    )
    if make is AlternatingTrainOneStepCell:
        # The one without aux need not take part in every call.
        cell.set_every((2, 1))
    for call in range(2):
        inputs = pair_batch(call)
        auxes = cell(*inputs)[-1]
        assert auxes[0] == ()
        np.testing.assert_array_equal(auxes[1][0].asnumpy(), 2 * take(PAIRS[1], inputs)[0].asnumpy())
    if make is AlternatingTrainOneStepCell:
        assert [counters["applied_steps"] for counters in cell.counters()] == [1, 2]
