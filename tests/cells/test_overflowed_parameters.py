"""overflowed_parameters() names the parameters whose gradients were not finite in the last skipped step."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, ParameterTuple, Tensor, nn
from support.gan_networks import gan_batch
from support.linear_pair import CELLS, Trained
from support.training import state
from test_accumulation import Saturating, saturating_batch
from test_profile_gradients import gan

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, emulation


class GivenGradients(nn.Cell):
    """Its weights' gradients are its inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (Parameter(Tensor(np.zeros(2, np.float32)), name=name) for name in "abc")

    def construct(self, *grads):
        return (self.a * grads[0]).sum() + (self.b * grads[1]).sum() + (self.c * grads[2]).sum()


GOOD, INF, NAN = (Tensor(np.float32([1.0, value])) for value in (2.0, -np.inf, np.nan))


def given_gradients(**keywords):
    network = GivenGradients()
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), 8.0, **keywords).set_train()


@quick_in_pynative_mode
@pytest.mark.parametrize("keywords", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=["plain", "norm", "value"])
def test_names_exactly_those(mode, keywords):
    cell = given_gradients(**keywords)
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


class Stacked(nn.Cell):
    """Four weights of one shape, which are stacked, and one of another among them. Their gradients are its inputs."""

    def __init__(self):
        super().__init__()
        shapes = {"a": 2, "b": 3, "c": 2, "d": 2, "e": 2}
        self.weights = ParameterTuple(
            Parameter(Tensor(np.zeros(shape, np.float32)), name=name) for name, shape in shapes.items()
        )

    def construct(self, *grads):
        loss = 0.0
        for weight, grad in zip(self.weights, grads):
            loss += (weight * grad).sum()
        return loss


@quick_in_graph_mode
def test_of_stacked_gradients(mode):
    network = Stacked()
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), 8.0).set_train()
    names = [weight.name for weight in network.weights]
    for i, name in enumerate(names):
        grads = [np.full(its.shape, np.inf if i == j else 1.0, np.float32) for j, its in enumerate(network.weights)]
        assert bool(cell(*map(Tensor, grads))[1])
        assert cell.overflowed_parameters() == [name]


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", [*CELLS[:2], *slow(CELLS[2])])
@pytest.mark.parametrize("steps", [3, *slow(1)])
def test_in_all_cells(mode, kind, steps):
    trained = Trained(kind, steps=steps)
    count = len(trained.weights)
    names = ["first.weight", "second.weight"][:count]
    assert trained.cell.overflowed_parameters() == []

    def cycle(overflows):
        # In the middle of a cycle, whose other calls are clean.
        for call in range(steps):
            trained.call(call, overflows if call == steps // 2 else (False, False))

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


@pytest.mark.slow
def test_nothing_is_remembered_before_the_cycle_ends(mode):
    cell = given_gradients(gradient_accumulation_steps=2)
    cell(INF, GOOD, GOOD)
    assert cell.overflowed_parameters() == []
    cell(GOOD, GOOD, GOOD)
    assert cell.overflowed_parameters() == ["a"]
    # In a cycle that is ended early likewise.
    cell(GOOD, GOOD, NAN)
    cell.flush()
    assert cell.overflowed_parameters() == ["c"]


@quick_in_pynative_mode
def test_of_a_tuple_of_losses(mode):
    cell, _, _ = gan("tuple")
    cell.set_train()
    real, *others = gan_batch()
    cell(real * np.inf, *others)
    assert cell.overflowed_parameters() == [weight.name for weight in cell.weights if "discriminator" in weight.name]


@pytest.mark.slow
def test_empty_if_only_the_register_told(mode):
    with emulation.saturation_mode():
        network = Saturating("only")
        cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params()), DynamicLossScale(2.0**4)).set_train()
        assert bool(cell(*saturating_batch(True, 0))[1])
    assert cell.counters()["skipped_steps"] == 1
    assert cell.overflowed_parameters() == []


@pytest.mark.parametrize("load", ["load_state_dict", "load_param_into_net", "load_checkpoint"])
@quick_in_pynative_mode
def test_those_of_other_weights_are_left_out(mode, load, tmp_path):
    network = GivenGradients()
    # One weight is trained first, and then all of them.
    first, cell = (
        ScaledTrainOneStepCell(network, nn.SGD(weights), 8.0).set_train()
        for weights in ([network.b], network.trainable_params())
    )
    first(GOOD, INF, GOOD)
    path = str(tmp_path / "first.ckpt")
    mindspore.save_checkpoint(first, path)
    cell(INF, GOOD, NAN)
    if load == "load_state_dict":
        missing, unexpected = cell.load_state_dict(mindspore.load_checkpoint(path), strict=False)
    elif load == "load_param_into_net":
        missing, unexpected = mindspore.load_param_into_net(cell, mindspore.load_checkpoint(path))
    else:
        mindspore.load_checkpoint(path, net=cell)
        missing, unexpected = ["accum.a"], []
    # The state of the optimizer's other weights is missing.
    assert all(name.endswith((".a", ".c")) for name in missing) and unexpected == []
    assert cell.overflowed_parameters() == ["a", "c"]
    assert cell.counters()["skipped_steps"] == 1
    cell(GOOD, NAN, GOOD)
    assert cell.overflowed_parameters() == ["b"]
    # Those of the same weights are loaded.
    same = {name: Tensor(value) for name, value in state(cell).items()}
    cell(INF, GOOD, GOOD)
    assert cell.load_state_dict(same) == ([], [])
    assert cell.overflowed_parameters() == ["b"]
