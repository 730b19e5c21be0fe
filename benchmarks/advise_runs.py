"""
Counts the runs of advise_float32 on a ResNet-50-like network and on a 12-layer transformer. For comparison, bisecting
by hand takes about k log2(n) runs to find k of n cells.

    python benchmarks/advise_runs.py
"""

import os
import sys
import time
from pathlib import Path

os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "diagnosis"))

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn
from mindspore import dtype as mstype
from overflowing import CLASSES, ResNet, Transformer

from ms_lossscale import advise_float32

# Narrow, since only the number of cells matters.
NETWORKS = {
    "ResNet-50-like": lambda: ResNet((3, 4, 6, 3), channels=4),
    "transformer, 12 layers": lambda: Transformer(depth=12, width=16, heads=2),
}


def main():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    random = np.random.default_rng(0)
    images = random.uniform(0, 1, (8, 1, 28, 28)).astype(np.float32)
    # Rows that are masked.
    images[:, :, :4] = 0
    batch = Tensor(images), Tensor(random.integers(0, CLASSES, 8), mstype.int32)
    print(f"{'network':24} {'cells':>5} {'need float32':>12} {'runs':>5} {'seconds':>8}")
    for name, make in NETWORKS.items():
        mindspore.set_seed(0)
        loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        network = nn.WithLossCell(amp.auto_mixed_precision(make(), "O3"), loss)
        start = time.perf_counter()
        advice = advise_float32(network, [batch])
        seconds = time.perf_counter() - start
        cells = len(list(network.cells_and_names()))
        print(f"{name:24} {cells:5} {len(advice.cells):12} {advice.runs:5} {seconds:8.0f}", flush=True)
        assert advice.holds, advice


if __name__ == "__main__":
    main()
