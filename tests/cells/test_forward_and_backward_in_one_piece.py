"""
No branch parts the forward from the backward. MindSpore would compile two kernel graphs: it fuses nothing across the
cut, and reads the condition while the device waits. On which side of a branch an operator is, what it depends on tells.
"""

import numpy as np
import pytest
from mindspore import GRAPH_MODE, Tensor, nn
from support.compiled_graph import CompiledGraph
from support.in_mode import in_mode

from ms_lossscale import DynamicLossScale, ManualStep, NormSpike, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dense(4, 1))

    def construct(self, x):
        return self.layers(x).square().mean()


class NetworkWithAux(Network):
    def construct(self, x):
        output = self.layers(x)
        return output.square().mean(), output


class AroundOwnForward(nn.Cell):
    def __init__(self, network, optimizer, **keywords):
        super().__init__()
        self.step = ManualStep(network, optimizer, **keywords)
        self.value_and_grad = self.step.value_and_grad(network)

    def construct(self, x):
        loss, grads = self.value_and_grad(self.step.begin(x))
        return loss, self.step.end(grads)


def simultaneous(network, optimizer, **keywords):
    other = Network()
    other.update_parameters_name("other.")
    optimizers = [optimizer, nn.Momentum(other.trainable_params(), 0.1, 0.9)]
    return SimultaneousTrainOneStepCell([network, other], optimizers, **keywords)


def is_of_networks(kind):
    return kind in ("MatMul", "BatchNorm") or kind.endswith("Grad")


@pytest.mark.parametrize(
    "make, keywords",
    [
        (ScaledTrainOneStepCell, {}),
        (ScaledTrainOneStepCell, {"loss_scale": 1024.0, "clip_value": 1.0}),
        (ScaledTrainOneStepCell, {"clip_norm": 1.0, "ema_decay": 0.9}),
        (ScaledTrainOneStepCell, {"max_retries": 2}),
        (ScaledTrainOneStepCell, {"gradient_accumulation_steps": 2}),
        (ScaledTrainOneStepCell, {"gradient_accumulation_steps": 2, "drop_overflowed_calls": True}),
        (ScaledTrainOneStepCell, {"skip_conditions": [NormSpike(max_norm=1e9)]}),
        (ScaledTrainOneStepCell, {"has_aux": True}),
        (simultaneous, {"ema_decay": 0.9}),
        (AroundOwnForward, {"clip_norm": 1.0}),
    ],
)
def test_no_branch_is_between_forward_and_backward(make, keywords):
    network = NetworkWithAux() if "has_aux" in keywords else Network()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    with in_mode(GRAPH_MODE):
        cell = make(network, optimizer, **{"loss_scale": DynamicLossScale(), **keywords}).set_train()
        cell(Tensor(np.ones((3, 4), np.float32)))
    graph = CompiledGraph(cell)
    of_networks = graph.of_kind(is_of_networks)
    assert len(of_networks) >= 6
    for branch in graph.of_kind(lambda kind: kind == "Switch"):
        comes_after_all = of_networks <= graph.before(branch)
        comes_before_all = all(branch in graph.before(name) for name in of_networks)
        assert comes_after_all or comes_before_all


class WithoutState(Network):
    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 1))


@pytest.mark.parametrize("keywords", [{}, {"ema_decay": 0.9}])
def test_a_compiled_step_has_one_branch(keywords):
    """The host waits for the device at each: whether a call began, and many skips, are asked of where it is skipped."""
    network = WithoutState()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    with in_mode(GRAPH_MODE):
        cell = AroundOwnForward(network, optimizer, loss_scale=DynamicLossScale(), **keywords).set_train()
        cell(Tensor(np.ones((3, 4), np.float32)))
    assert len(CompiledGraph(cell).of_kind(lambda kind: kind == "Switch")) == 1
