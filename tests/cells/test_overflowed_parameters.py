"""overflowed_parameters() names the parameters whose gradients were not finite in the last skipped step."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn
from support.linear_pair import CELLS, Trained
from support.npu_networks import Saturating, saturating_batch
from support.training import by_sgd

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, emulation


class GivenGradients(nn.Cell):
    """Its weights' gradients are its inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (Parameter(Tensor(np.zeros(2, np.float32)), name=name) for name in "abc")

    def construct(self, *grads):
        return (self.a * grads[0]).sum() + (self.b * grads[1]).sum() + (self.c * grads[2]).sum()


GOOD, INF, NAN = (Tensor(np.float32([1.0, value])) for value in (2.0, -np.inf, np.nan))


@quick_in_pynative_mode
@pytest.mark.parametrize("keywords", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=["plain", "norm", "value"])
def test_names_exactly_those(mode, keywords):
    cell = by_sgd(GivenGradients(), 8.0, **keywords)
    assert cell.overflowed_parameters() == []
    for grads, names in (
        ((GOOD, INF, GOOD), ["b"]),
        ((NAN, GOOD, INF), ["a", "c"]),
        ((GOOD, GOOD, NAN), ["c"]),
        ((INF, INF, INF), ["a", "b", "c"]),
    ):
        assert bool(cell(*grads)[1])
        assert cell.overflowed_parameters() == names
        # An applied step leaves them.
        assert not bool(cell(GOOD, GOOD, GOOD)[1])
        assert cell.overflowed_parameters() == names


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", [*CELLS[:2], *slow(CELLS[2])])
@pytest.mark.parametrize("steps", [3, *slow(1)])
def test_in_all_cells(mode, kind, steps):
    trained = Trained(kind, steps=steps)
    count = len(trained.weights)
    names = ["first.weight", "second.weight"][:count]
    assert trained.cell.overflowed_parameters() == []

    def cycle(overflows):
        # In the middle of a cycle, whose other calls are clean. Nothing is remembered before it ends.
        before = trained.cell.overflowed_parameters()
        for call in range(steps):
            assert trained.cell.overflowed_parameters() == before
            trained.call_cell(call, overflows if call == steps // 2 else (False, False))

    for i in range(count):
        overflows = tuple(i == j for j in range(2))
        cycle(overflows)
        # Alternating networks remember their own.
        seen = names[: i + 1] if kind == "alternating" else [names[i]]
        assert trained.cell.overflowed_parameters() == seen
        cycle((False, False))
        assert trained.cell.overflowed_parameters() == seen
    cycle((True, True))
    assert trained.cell.overflowed_parameters() == names
    if steps > 1:
        # In a cycle that is ended early likewise.
        trained.call_cell(0, (True, False))
        trained.cell.flush()
        assert trained.cell.overflowed_parameters() == (names if kind == "alternating" else names[:1])


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


@pytest.mark.slow
def test_empty_if_only_the_register_told(mode):
    with emulation.saturation_mode():
        cell = by_sgd(Saturating("only"), DynamicLossScale(2.0**4))
        assert bool(cell(*saturating_batch(True, 0))[1])
    assert cell.counters()["skipped_steps"] == 1
    assert cell.overflowed_parameters() == []
