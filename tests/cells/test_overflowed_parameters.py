"""What overflowed_parameters() tells after another checkpoint was loaded. The configurations compare it each step."""

import mindspore
import numpy as np
from conftest import quick_in_pynative_mode
from mindspore import Parameter, Tensor, nn

from ms_lossscale import ScaledTrainOneStepCell


class GivenGradients(nn.Cell):
    """Its weights' gradients are its inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (Parameter(Tensor(np.zeros(2, np.float32)), name=name) for name in "abc")

    def construct(self, *grads):
        return (self.a * grads[0]).sum() + (self.b * grads[1]).sum() + (self.c * grads[2]).sum()


GOOD, INF, NAN = (Tensor(np.float32([1.0, value])) for value in (2.0, -np.inf, np.nan))


@quick_in_pynative_mode
def test_a_checkpoint_of_other_weights_is_loaded_with_and_without_those_of_0_4(mode):
    network = GivenGradients()
    # One weight is trained first, and then all of them.
    first, cell = (
        ScaledTrainOneStepCell(network, nn.SGD(weights), 8.0).set_train()
        for weights in ([network.b], network.trainable_params())
    )
    first(GOOD, INF, GOOD)
    cell(INF, GOOD, NAN)
    saved = {name: Parameter(parameter.value(), name=name) for name, parameter in first.parameters_dict().items()}
    of_0_4 = {**saved, "step_counters.overflowed": Parameter(Tensor([True]), name="step_counters.overflowed")}
    for checkpoint in (saved, of_0_4):
        missing, unexpected = cell.load_state_dict(checkpoint, strict=False)
        # The state of the optimizer's other weights is missing.
        assert all(name.endswith((".a", ".c")) for name in missing) and unexpected == []
        mindspore.load_param_into_net(cell, checkpoint)
        assert cell.overflowed_parameters() == ["a", "c"]
        assert cell.counters()["skipped_steps"] == 1
    cell(GOOD, NAN, GOOD)
    assert cell.overflowed_parameters() == ["b"]
