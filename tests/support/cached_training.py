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

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell
from support.manual_training import adam, batches, regression


def stock_function(network, _):  # A compiled function without this package.
    optimizer = adam(network)
    value_and_grad = mindspore.value_and_grad(network, None, optimizer.parameters)

    @mindspore.jit
    def train_step(x, y):
        loss, grads = value_and_grad(x, y)
        return ops.depend(loss, optimizer(grads))

    return network, train_step


def scaled(network, _, **keywords):
    cell = ScaledTrainOneStepCell(network, adam(network), DynamicLossScale(2.0**10, scale_window=2), **keywords)
    return cell, cell


def retried_cycle(network, other):
    return scaled(network, other, gradient_accumulation_steps=2, max_retries=1, clip_norm=1.0, ema_decay=0.9)


def simultaneous(network, other):
    networks, scale = [network, other], DynamicLossScale(2.0**10, scale_window=2)
    cell = SimultaneousTrainOneStepCell(networks, list(map(adam, networks)), scale, network_inputs=[(0, 1), (0, 1)])
    return cell, cell


KINDS = {each.__name__: each for each in (stock_function, scaled, retried_cycle, simultaneous)}


def main():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    kind = sys.argv[1]
    trained, train_step = KINDS[kind](regression(0, "network_0."), regression(1, "network_1."))
    trained.set_train()
    for x, y in batches("...." if kind == "stock_function" else "..x.x..."):
        train_step(x, y)
    digest = hashlib.sha256()
    for name, parameter in sorted(trained.parameters_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(parameter.asnumpy()).tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
