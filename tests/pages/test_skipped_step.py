"""What docs/skipped_step.md says of losses that are not finite, and its conditions, in real training."""

import re

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.python_process import ROOT, import_code

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell

PAGE = (ROOT / "docs" / "skipped_step.md").read_text()
CLASSES = re.findall(r"^class \w+\(SkipCondition\):\n(?:(?: {4}.*)?\n)+", PAGE, re.M)
IMPORTS = "from mindspore import Parameter, Tensor, ops\nfrom ms_lossscale import SkipCondition\n\n\n"
RATE = 0.125


@pytest.fixture
def page(tmp_path):
    assert len(CLASSES) == 3
    return import_code(tmp_path, IMPORTS + "\n\n".join(CLASSES))


class Sum(nn.Cell):  # The gradient of the weight is 1, whatever else the loss has.
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), name="weight")

    def construct(self, rest):
        return (self.weight + ops.stop_gradient(rest)).sum()


def train(rests, conditions, manual=False):
    """Returns which steps were skipped, and how many were applied, as the weight tells."""
    network = Sum()
    optimizer = nn.SGD(network.trainable_params(), RATE)
    loss_scale = DynamicLossScale(1024.0, scale_window=1000)
    if manual:
        step = ManualStep(network, optimizer, loss_scale, skip_conditions=conditions)
        value_and_grad = step.value_and_grad(network)

        def cell(rest):
            rest = step.begin(rest)
            loss, grads = value_and_grad(rest)
            return loss, step.end(grads, loss=loss)
    else:
        step = cell = ScaledTrainOneStepCell(network, optimizer, loss_scale, skip_conditions=conditions)
    skipped = [bool(cell(Tensor([rest]))[1]) for rest in rests]
    assert step.get_loss_scale() == 1024
    assert sum(step.skip_reasons().values()) == sum(skipped)
    applied = (1 - float(network.weight.asnumpy()[0])) / RATE
    assert applied == len(rests) - sum(skipped)
    return skipped


NOT_FINITE = [0.0, np.nan, np.inf, -np.inf, 0.0]


def test_a_step_whose_loss_alone_is_not_finite_is_applied(mode):
    assert train(NOT_FINITE, []) == [False] * 5


@pytest.mark.parametrize("manual", [False, True], ids=["cell", "manual"])
def test_a_condition_of_three_lines_skips_it(mode, manual, page):
    assert train(NOT_FINITE, [page.FiniteLoss()], manual) == [False, True, True, True, False]


def test_no_loss_ends_the_guard_against_jumps(mode, page):
    jump = page.LossJump(5.0)
    # The weight moves the losses a little.
    rests = [np.nan, np.inf, 9.0, np.nan, 9.0, 900.0, np.inf, 9.0]
    assert train(rests, [jump]) == [False, False, False, True, False, True, True, False]
    assert 5 < float(jump.mean) < 15


class Zeros(nn.Cell):  # No gradient of its weight is there, but for those of a batch with objects.
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0]), name="weight")

    def construct(self, objects):
        return (self.weight * objects).sum()


def test_a_step_without_gradients_moves_weights_unless_a_condition_skips_it(mode, page):
    moved = []
    for conditions in ([], [page.NoGradient()]):
        network = Zeros()
        optimizer = nn.Momentum(network.trainable_params(), RATE, 0.9, weight_decay=0.5)
        cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(1024.0), skip_conditions=conditions)
        _, overflow, _ = cell(Tensor([0.0]))
        assert bool(overflow) == bool(conditions)
        moved.append(float(network.weight.asnumpy()[0]) != 1)
        assert not cell(Tensor([1.0]))[1]
    assert moved == [True, False]
