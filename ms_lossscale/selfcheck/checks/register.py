"""Whether the overflow that a step finds is its own: not that of other work, nor of another network's phase."""

import itertools

from ms_lossscale import AlternatingTrainOneStepCell, FixedLossScale, FloatStatusRegister, SimultaneousTrainOneStepCell
from ms_lossscale.selfcheck.claim import check, expect, expect_equal
from ms_lossscale.selfcheck.networks import (
    BACKWARD_OVERFLOWS,
    FORWARD_OVERFLOWS,
    LOSS_SCALE,
    Products,
    cell_of_products,
    inputs,
    slow_adam,
)


def _two_networks(device, cell_class):
    networks = [Products(device, 1, f"network_{i}.") for i in range(2)]
    loss_scales = [FixedLossScale(LOSS_SCALE) for _ in networks]
    return cell_class(
        networks,
        [slow_adam(network) for network in networks],
        loss_scales if cell_class is AlternatingTrainOneStepCell else loss_scales[0],
        network_inputs=[(0,), (1,)],
    ).set_train()


@check(quick=True)
def an_overflow_before_a_step_is_not_the_steps(device):
    """What overflowed before a step, an evaluation or an initialisation, is not taken for the step's overflow."""
    cell = cell_of_products(device, FixedLossScale(LOSS_SCALE))
    for step in range(3):
        # Read, so that it has happened.
        Products(device, prefix="other.")(*inputs(FORWARD_OVERFLOWS, 1.0, 1.0)).asnumpy()
        overflow = bool(cell(*inputs(1.0, 1.0, 1.0))[1])
        expect(not overflow, f"step {step} was skipped for the overflow of an evaluation before it")


@check(quick=True)
def phases_are_told_apart(device):
    """In the alternating cell each network receives its own overflow and not the other's, in all orders."""
    cell = _two_networks(device, AlternatingTrainOneStepCell)
    neither, first, second, both = (False, False), (True, False), (False, True), (True, True)
    # Each of the four after each of the four.
    order = [neither, neither, first, first, second, second, both, both, neither]
    order += [second, first, both, first, neither, both, second, neither]
    for i, pattern in enumerate(order):
        value = (BACKWARD_OVERFLOWS, FORWARD_OVERFLOWS)[i % 2]
        overflow = cell(*inputs(*(value if overflows else 1.0 for overflows in pattern)))[1]
        expect_equal(
            tuple(overflow.asnumpy().tolist()),
            pattern,
            f"which of two networks overflowed, at inputs of {value} after steps with {order[:i]}",
        )


@check()
def networks_share_one_overflow_check(device):
    """In the simultaneous cell an overflow of either network skips both."""
    cell = _two_networks(device, SimultaneousTrainOneStepCell)
    weights = [network.weights[0] for network in cell.network]
    for pattern in itertools.product((False, True), repeat=2):
        before = [weight.asnumpy().copy() for weight in weights]
        overflow = bool(cell(*inputs(*(BACKWARD_OVERFLOWS if overflows else 1.0 for overflows in pattern)))[1])
        expect_equal(
            overflow, any(pattern), f"whether an overflow was found where the networks' overflows are {pattern}"
        )
        moved = [bool((weight.asnumpy() != its).any()) for weight, its in zip(weights, before)]
        expect_equal(moved, [not overflow] * 2, f"which weights moved where the networks' overflows are {pattern}")


@check("has_register", quick=True)
def reading_the_register_consumes_it(device):
    """A detector sees a raised register once: what it has read is gone for the next one."""
    detector = FloatStatusRegister()
    Products(device)(*inputs(FORWARD_OVERFLOWS, 1.0, 1.0)).asnumpy()
    seen = [bool(detector(())) for _ in range(2)]
    expect_equal(seen, [True, False], "what is read after an overflow, twice")
