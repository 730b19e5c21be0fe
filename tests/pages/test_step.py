"""What docs/step.md says of weights that are frozen and unfrozen, and of float16 weights."""

import re

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from support.python_process import ROOT, import_code, skip_with_older_mindspore

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

PAGE = (ROOT / "docs" / "step.md").read_text()
(UNFREEZE,) = re.findall(r"^```py\n(for weight in backbone.*?)^```", PAGE, re.S | re.M)
(TO_FLOAT32,) = re.findall(r"^```py\n(for weight in net.trainable.*?)^```", PAGE, re.S | re.M)
INPUTS = Tensor(np.ones((2, 2), np.float32)), Tensor(np.ones((2, 1), np.float32))
SET_UP = """
import numpy as np
from mindspore import Tensor, nn
from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

backbone, head = nn.Dense(2, 2), nn.Dense(2, 1)
net = nn.SequentialCell(backbone, head)
network = nn.WithLossCell(net, nn.MSELoss())
for weight in backbone.get_parameters():
    weight.requires_grad = False
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale()).set_train()
inputs = Tensor(np.ones((2, 2), np.float32)), Tensor(np.ones((2, 1), np.float32))
weights = [backbone.weight.asnumpy().copy()]
for _ in range(2):
    cell(*inputs)
weights.append(backbone.weight.asnumpy().copy())
moment = cell.parameters_dict()["moments.1.weight"].asnumpy().copy()
"""


def is_trained(cell, weight):
    before = weight.asnumpy().copy()
    cell(*INPUTS)
    return bool((weight.asnumpy() != before).any())


@quick_in_pynative_mode
def test_a_new_cell_unfreezes_and_goes_on(mode, tmp_path):
    if mode == "pynative":
        skip_with_older_mindspore("MindSpore 2.7's own cells do not train a weight that has run frozen, either")
    page = import_code(tmp_path, SET_UP + UNFREEZE)
    assert (page.weights[0] == page.weights[1]).all()
    assert page.new_cell.counters()["applied_steps"] == 2
    assert (page.new_cell.parameters_dict()["moments.1.weight"].asnumpy() == page.moment).all()
    assert is_trained(page.new_cell, page.backbone.weight)
    assert page.new_cell.counters()["applied_steps"] == 3


@pytest.mark.parametrize("is_ours", [False, True], ids=["stock", "ours"])
def test_a_weight_that_is_frozen_once_the_cell_has_run_is_trained_all_the_same(mode, is_ours):
    """In graph mode also one that was frozen before, but after the optimizer was made."""
    backbone, head = nn.Dense(2, 2), nn.Dense(2, 1)
    net = nn.SequentialCell(backbone, head)
    network = nn.WithLossCell(net, nn.MSELoss())
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    if mode == "graph":
        backbone.weight.requires_grad = False
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale()) if is_ours else None
    cell = (cell or nn.TrainOneStepCell(network, optimizer)).set_train()
    assert is_trained(cell, backbone.weight)
    backbone.weight.requires_grad = False
    assert is_trained(cell, backbone.weight)


@quick_in_pynative_mode
def test_float16_weights_become_float32_ones_that_compute_in_float16(mode, tmp_path):
    imports = "from mindspore import dtype as mstype\nfrom mindspore import nn\n\n"
    networks = "net, loss_fn = nn.Dense(2, 1, dtype=mstype.float16), nn.MSELoss()"
    page = import_code(tmp_path, f"{imports}{networks}\n{TO_FLOAT32}")
    assert all(weight.dtype == mstype.float32 for weight in page.optimizer.parameters)
    assert page.net(INPUTS[0]).dtype == mstype.float16
    network = nn.WithLossCell(page.net, page.loss_fn)
    cell = ScaledTrainOneStepCell(network, page.optimizer, DynamicLossScale(2.0**10)).set_train()
    assert is_trained(cell, page.net.weight)
