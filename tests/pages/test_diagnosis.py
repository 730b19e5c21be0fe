"""The callback of docs/diagnosis.md that writes to TensorBoard and stops at a scale, in real training."""

import re

import numpy as np
import pytest
from conftest import quick_in_graph_mode
from mindspore import Tensor, nn
from support.python_process import ROOT, import_code

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

PAGE = (ROOT / "docs" / "diagnosis.md").read_text()
(RECIPE,) = re.findall(r"^class ToTensorBoard.*?\n\n\n", PAGE, re.S | re.M)
SET_UP = """
from ms_lossscale import LossScaleMonitor


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, *scalar):
        self.scalars.append(scalar)


writer = Writer()
schedule = [0.1] * 4


"""


@quick_in_graph_mode
@pytest.mark.parametrize("clip_norm", [None, float("inf")])
def test_a_record_has_the_norm_of_its_own_step(mode, clip_norm, tmp_path):
    page = import_code(tmp_path, SET_UP + RECIPE)
    net = nn.Dense(4, 1, weight_init="zeros", has_bias=False)
    cell = ScaledTrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1), DynamicLossScale(1024), clip_norm=clip_norm)
    monitor = page.ToTensorBoard(every_n_steps=3)
    with monitor.watching(cell):
        for size in (1, 2, 3):
            # The gradient is the input.
            monitor.after_step(*cell(Tensor(np.full((1, 4), size, np.float32))))
    expected = []
    for step in (1, 2, 3):
        expected.append(("loss_scale", 1024.0, step))
        if clip_norm is not None:
            expected.append(("grad_norm", 2.0 * step, step))
    assert page.writer.scalars == expected
