"""A training that MindSpore's compile cache serves: `python cached_training.py KIND` prints a hash of all state after
it. Set MS_COMPILER_CACHE_ENABLE and MS_COMPILER_CACHE_PATH."""

import hashlib
import os
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# To find the package `support` when run as a program.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from mindspore import ops

from support.held_cells import CELLS, adam, train
from support.manual_training import regression


def stock_function():  # A network, and a compiled function without this package that trains it.
    network = regression()
    optimizer = adam(network)
    value_and_grad = mindspore.value_and_grad(network, None, optimizer.parameters)

    @mindspore.jit
    def train_step(x, y):
        loss, grads = value_and_grad(x, y)
        return ops.depend(loss, optimizer(grads))

    return network, train_step


if __name__ == "__main__":
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    kind = sys.argv[1]
    trained, call = stock_function() if kind == "stock_function" else [CELLS[kind]()] * 2
    # Of the function without a scale, the second call would leave NaN.
    train(call, 0 if kind in CELLS else 2, 8)
    digest = hashlib.sha256()
    for name, parameter in sorted(trained.parameters_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(parameter.asnumpy()).tobytes())
    print(digest.hexdigest())
