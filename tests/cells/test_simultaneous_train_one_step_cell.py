"""
SimultaneousTrainOneStepCell: one overflow check and one update for several networks.

The oracle is MindSpore's own differentiation of each loss alone, followed by the stock optimizers.
"""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import dtype as mstype
from mindspore import nn
from support import gan_networks as gan
from support.networks import LossOfShape, batch_for
from support.training import changed, same_bits, state

from ms_lossscale import DynamicLossScale, SimultaneousTrainOneStepCell

# For each step the losses that overflow, and the scales as powers of two, where each network has its own.
STEPS = [((), (10, 10)), ((), (10, 10)), ((0,), (11, 11)), ((), (10, 11)), ((1,), (10, 11)), ((0, 1), (10, 10))]
STEPS += [((), (9, 9))]


def loss_scale():
    return DynamicLossScale(2.0**10, scale_window=2)


def as_numpy(outputs):
    return [output.asnumpy() for output in outputs]


def forward_by_hand(form):
    """The losses of the list's cells in turn, or of the one network, and the statistics that BatchNorm has then."""
    networks, inputs = gan.generator_and_discriminator(), gan.gan_batch()
    if form == "tuple":
        losses = gan.GanLosses(*networks).set_train()(*inputs)
    else:
        pairs = zip(gan.two_losses(*networks), gan.NETWORK_INPUTS)
        losses = [loss.set_train()(*gan.take(positions, inputs)) for loss, positions in pairs]
    return as_numpy(losses), {p.name: p.asnumpy() for n in networks for p in n.get_parameters() if "moving" in p.name}


# Each mode and each form is in one of the quick tests; that both forms and modes train alike is in the long ones.
@pytest.mark.parametrize(
    ("mode", "form"),
    [("graph", "list"), ("pynative", "tuple"), *slow(("graph", "tuple"), ("pynative", "list"))],
    indirect=["mode"],
)
def test_a_gan(mode, form):
    """Each loss goes through both networks, of 3 and of 4 weights, and in the list each has a scale of its own."""
    networks, own = gan.generator_and_discriminator(), gan.generator_and_discriminator()
    counted = gan.Counted(networks[0])
    inside = counted, networks[1]
    one, positions = (
        (gan.GanLosses(*inside), None) if form == "tuple" else (gan.two_losses(*inside), gan.NETWORK_INPUTS)
    )
    optimizers, scales = gan.two_optimizers(*inside), loss_scale() if form == "tuple" else [loss_scale(), loss_scale()]
    cell = SimultaneousTrainOneStepCell(one, optimizers, scales, network_inputs=positions).set_train()
    # By hand: both gradients at the same weights, each by mindspore.grad alone, then both optimizers.
    losses, optimizers = gan.two_losses(*own), gan.two_optimizers(*own)
    gradients = [mindspore.grad(loss, None, optimizer.parameters) for loss, optimizer in zip(losses, optimizers)]
    trained = {p.name: p for network in own for p in network.trainable_params()}
    first_losses, first_statistics = forward_by_hand(form)
    for step, (overflows, exponents) in enumerate(STEPS):
        before, inputs = state(cell), gan.gan_batch(seed=step, overflow_in=overflows)
        tensors = cell(*inputs)
        types = [(output.dtype, output.shape) for output in tensors]
        scalar, two = (mstype.float32, ()), (mstype.float32, (2,))
        assert types == [scalar, (mstype.bool_, ()), scalar if form == "tuple" else two, two]
        loss, overflow, used, its_losses = as_numpy(tensors)
        assert bool(overflow) == bool(overflows)
        assert form == "tuple" or used.tolist() == [2.0**exponent for exponent in exponents]
        after = state(cell)
        if overflows:
            moved = changed(before, after)
            assert "step_counters.skipped_steps" in moved
            assert all("loss_scale." in name or name.startswith("step_counters.") for name in moved)
        else:
            grads = [gradient(*gan.take(its, inputs)) for gradient, its in zip(gradients, gan.NETWORK_INPUTS)]
            for optimizer, its in zip(optimizers, grads):
                optimizer(its)
            for name, parameter in trained.items():
                assert same_bits(after[name], parameter.asnumpy()), (step, name)
                assert not same_bits(after[name], before[name])
        if step == 0:
            np.testing.assert_array_equal(its_losses, first_losses)
            # In float32: a sum() from 0 has float64 with NumPy 1.
            assert loss == first_losses[0] + first_losses[1]
            assert len(first_statistics) == 4
            assert not changed(first_statistics, {name: after[name] for name in first_statistics})
    # The tuple does shared work once.
    assert counted.runs == len(STEPS) or form == "list"


def errors_of(network, x, y):
    """The control of `LossOfShape`, in float64: the errors, and the gradient of the sum of squares."""
    x, y, start = (tensor.asnumpy().astype(np.float64) for tensor in (x, y, network.weight))
    errors = x @ start - y
    return errors, 2 * x.T @ errors, start


@quick_in_pynative_mode
@pytest.mark.parametrize("form", ["list", "tuple"])
def test_three_networks_with_losses_of_any_shape_and_inputs_in_any_order(mode, form):
    """As in stock MindSpore, the sum of a loss is what is trained."""
    networks = [gan.renamed(f"{i}.", LossOfShape(shape)) for i, shape in enumerate([(), (1,), (4, 1)])]
    optimizers = [nn.SGD(network.trainable_params(), learning_rate=0.01) for network in networks]
    one, positions = (gan.TupleOf(*networks), None) if form == "tuple" else (networks, [(2, 0), [1, 0], (2, 0)])
    cell = SimultaneousTrainOneStepCell(one, optimizers, 2.0**10, network_inputs=positions).set_train()
    for step, overflow in enumerate((False, True, False)):
        (x, y), (other, _) = batch_for(overflow, seed=step), batch_for(False, seed=step + 3)
        its = [x, other, x] if form == "list" else [x] * 3
        controls = [errors_of(network, x, y) for network, x in zip(networks, its)]
        loss, reported, _, losses = as_numpy(cell(y, other, x) if form == "list" else cell(x, y))
        assert bool(reported) is overflow
        for network, (_, gradient, start) in zip(networks, controls):
            if overflow:
                np.testing.assert_array_equal(network.weight.asnumpy(), start)
            else:
                np.testing.assert_allclose(network.weight.asnumpy(), start - 0.01 * gradient, rtol=1e-5, atol=1e-6)
        if not overflow:
            np.testing.assert_allclose(losses, [np.square(errors).sum() for errors, _, _ in controls], rtol=1e-5)
            np.testing.assert_allclose(loss, losses.sum(dtype=np.float64), rtol=1e-6)
    assert cell.counters() == {"applied_steps": 2, "skipped_steps": 1, "consecutive_skipped_steps": 0}
