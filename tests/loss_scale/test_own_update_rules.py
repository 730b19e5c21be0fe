"""An update rule of the user's own: whatever it returns, the scale stays one."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype
from support.networks import Linear, batch
from support.training import by_sgd

from ms_lossscale import LossScale

INF, NAN = float("inf"), float("nan")


class Returns(LossScale):
    """Returns one value after each step."""

    def __init__(self, value):
        super().__init__(8.0)
        self.value = Parameter(Tensor(value), name="returned", requires_grad=False)

    def next_scale(self, loss_scale, overflow):
        return ops.depend(self.value, loss_scale)


def in_a_cell(loss_scale, steps):
    cell = by_sgd(Linear(), loss_scale, gradient_accumulation_steps=steps)

    def run():
        for _ in range(steps):
            assert cell(*batch())[2].asnumpy() == 8.0

    return run


def in_mindspores_cell(loss_scale, shape):
    """As nn.TrainOneStepWithLossScaleCell does, which does not run on CPU."""

    def run():
        held = Parameter(Tensor(np.full(shape, 8.0, np.float32)), name="held")
        loss_scale(held, Tensor(False))
        assert held.shape == shape
        assert held.asnumpy().reshape(()) == loss_scale.get_loss_scale()

    return run


# From a loss scale to what makes a step with it.
USES = {
    "cell": lambda loss_scale: in_a_cell(loss_scale, 1),
    "cycle": lambda loss_scale: in_a_cell(loss_scale, 2),
    "loop": lambda loss_scale: lambda: loss_scale.adjust(Tensor(True)),
    "mindspore": lambda loss_scale: in_mindspores_cell(loss_scale, ()),
    "mindspore (1,)": lambda loss_scale: in_mindspores_cell(loss_scale, (1,)),
}


@quick_in_pynative_mode
@pytest.mark.parametrize("use", USES)
def test_what_can_be_no_scale_is_not_taken(mode, use):
    loss_scale = Returns(np.float32(0))
    run = USES[use](loss_scale)
    for value in (NAN, INF, 0.0, -16.0, 2.0**127, 2.0**-127):
        ops.assign(loss_scale.value, Tensor(np.float32(value)))
        run()
        assert loss_scale.get_loss_scale() == 8.0, value
    # But for the value, it would be.
    ops.assign(loss_scale.value, Tensor(np.float32(16)))
    run()
    assert loss_scale.get_loss_scale() == 16.0


@quick_in_pynative_mode
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("value", [np.float16(32.0), np.float32([32.0]), np.float64([[32.0]]), np.int32(32)], ids=repr)
def test_the_scale_stays_a_float32_of_its_shape(mode, use, value):
    loss_scale = Returns(value)
    USES[use](loss_scale)()
    assert loss_scale.get_loss_scale() == 32.0
    assert (loss_scale.scale_value.dtype, loss_scale.scale_value.shape) == (mstype.float32, ())


@quick_in_pynative_mode
def test_the_former_name_of_a_step_of_the_law_works_and_is_told(mode):
    loss_scale = Returns(np.float32(16))
    with pytest.warns(FutureWarning, match="'advance' works for the last time. Call 'adjust") as warned:
        assert loss_scale.advance(loss_scale.scale_value, Tensor(False)).asnumpy() == 16.0
    assert warned[0].filename == __file__
