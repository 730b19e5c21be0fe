"""A step is compiled once for all batch sizes, if `set_inputs` tells it that they vary."""

import numpy as np
import pytest
from conftest import slow
from mindspore import Tensor
from mindspore import dtype as mstype
from support.gan_networks import WithAux
from support.manual_training import FEATURES, adam, regression
from support.training import cell_of

from ms_lossscale import DynamicLossScale

SIZES = (8, 3, 8)


def scaled():
    network = regression()
    keywords = {"has_aux": True, "gradient_accumulation_steps": 2, "clip_norm": 1.0, "ema_decay": 0.9}
    return cell_of("scaled", [WithAux(network)], [adam(network)], DynamicLossScale(), **keywords)


def alternating():
    networks = [regression(i, f"net_{i}.") for i in range(2)]
    return cell_of("alternating", networks, list(map(adam, networks)), DynamicLossScale())


CELLS = {"scaled": scaled, "alternating": alternating}


def train(cell):  # All that the cell returns, as bytes.
    outputs = []
    for size in SIZES:
        rng = np.random.default_rng(size)
        x, y = (Tensor(rng.normal(size=(size, width)).astype(np.float32)) for width in (FEATURES, 1))
        outputs.append([value.asnumpy().tobytes() for value in flat(cell(x, y))])
    return outputs


def flat(values):
    return [each for value in values for each in (flat(value) if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("mode", slow("graph"), indirect=True)
@pytest.mark.parametrize("name", CELLS)
def test_one_graph_serves_all_sizes_with_the_same_results(mode, name):
    cell, told = CELLS[name](), CELLS[name]()
    told.set_inputs(*(Tensor(shape=[None, width], dtype=mstype.float32) for width in (FEATURES, 1)))
    assert train(told) == train(cell)
    assert len(told.compile_cache) == 1
    # MindSpore's way otherwise: a graph for each size.
    assert len(cell.compile_cache) == len(set(SIZES))
