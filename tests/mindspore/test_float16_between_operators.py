"""What graph mode on CPU holds in float32, though the network is in float16."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import dtype as mstype


@pytest.mark.only_on("CPU", reason="others compute in float16")
def test_a_convolution_passes_its_output_to_batchnorm_in_float32_in_graph_mode(mode):
    """So `examples/diagnosis/advise.py` trains in PyNative mode, where it overflows as on a GPU or NPU."""
    network = nn.SequentialCell(nn.Conv2d(1, 2, 3, weight_init=1e4), nn.BatchNorm2d(2)).to_float(mstype.float16)
    images = np.random.default_rng(0).normal(size=(4, 1, 8, 8)).astype(np.float32)
    output = network.set_train()(Tensor(images)).asnumpy()
    assert np.isfinite(output).all() == (mindspore.get_context("mode") == mindspore.GRAPH_MODE)
