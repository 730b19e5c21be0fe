"""
Shows how many KiB of memory each call of a cell keeps in graph mode. MindSpore keeps what a branch computes and returns
until that branch is taken in a call of the other parity, so that patterns of even period grow for ever.

    python benchmarks/memory_growth.py [--calls N]

Each cell runs in a process of its own. Prints a table in GitHub's Markdown.
"""

import argparse
import gc
import json
import resource
from pathlib import Path

from base import measured_by, table, use
from common.options import positive_int
from tqdm import tqdm

SETTINGS = {
    "no accumulation": {},
    **{f"accumulation over {calls}": {"gradient_accumulation_steps": calls} for calls in (2, 3, 4)},
    "drop_overflowed_calls, over 2": {"gradient_accumulation_steps": 2, "drop_overflowed_calls": True},
    "every=(1, 2)": {"every": (1, 2)},
    "every=(1, 3)": {"every": (1, 3)},
}


def kept(name, calls):
    """Returns the KiB that a call of a cell keeps, from the second half of so many calls."""
    import mindspore
    import numpy as np
    from mindspore import nn

    from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell

    use("CPU")
    settings = SETTINGS[name]
    networks = [nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss()) for _ in range(2 if "every" in settings else 1)]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"network_{i}.")
    optimizers = [nn.AdamWeightDecay(network.trainable_params(), 1e-3) for network in networks]
    if "every" in settings:
        cell = AlternatingTrainOneStepCell(networks, optimizers, DynamicLossScale(), **settings)
    else:
        cell = ScaledTrainOneStepCell(networks[0], optimizers[0], DynamicLossScale(), **settings)
    inputs = [mindspore.Tensor(np.ones((8, width), np.float32)) for width in (4, 1)]
    cell.set_train()
    pages = []
    for _ in range(2):
        for _ in range(calls // 2):
            loss = cell(*inputs)[0]
        loss.asnumpy()
        gc.collect()
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    return (pages[1] - pages[0]) * resource.getpagesize() / 1024 / (calls // 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=positive_int, default=40_000, help="calls of each cell (default: %(default)s)")
    parser.add_argument("--cell", choices=SETTINGS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(kept(args.cell, args.calls)))
        return
    command = [Path(__file__), "--calls", args.calls, "--cell"]
    found = {name: measured_by(*command, name)[0] for name in tqdm(SETTINGS, unit="cell")}
    print(table([{"cell": name, "KiB a call": f"{growth:.1f}"} for name, growth in found.items()], left=1))


if __name__ == "__main__":
    main()
