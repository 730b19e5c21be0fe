"""
Prints for settings of ms_lossscale, on a small ResNet, how many kernels an applied step launches, and what MindSpore fused.

    python settings.py [--checkout FOLDER] [--mode pynative] [SETTING ...]
"""

import argparse
from collections import Counter
from functools import partial

import checkout
import dry_gpu

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("settings", nargs="*")
parser.add_argument("--checkout", default=".")
parser.add_argument("--case", default="resnet50_small")
parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
args = parser.parse_args()
launches = dry_gpu.Launches()
base, sides = checkout.use(args.checkout)
import mindspore
from mindspore import nn, ops

import ms_lossscale as ls


class HugeLoss(ls.SkipCondition):
    """Never true in a network that works."""

    def construct(self, loss, norm):
        return loss > 1e9


class Aux(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        loss = self.network(*inputs)
        return loss, loss * 2


def manual(network, compiled=True):
    step = ls.ManualStep(network.set_train(), sides.momentum(network), ls.DynamicLossScale())
    value_and_grad = step.value_and_grad(network)

    def run(*inputs):
        loss, grads = value_and_grad(*step.begin(*inputs))
        return ops.depend(loss, step.end(grads)) if compiled else (loss, step.end(grads))

    return sides.compiled(run) if compiled else run


SETTINGS = {
    "stock": sides.stock,
    "plain": sides.scaled,
    "loss_scale=None": sides.unscaled,
    "clip_norm": partial(sides.scaled, clip_norm=1.0),
    "ema_decay": partial(sides.scaled, ema_decay=0.9),
    "max_retries=3": partial(sides.scaled, max_retries=3),
    "accumulation of 4": partial(sides.scaled, gradient_accumulation_steps=4),
    "skip_conditions": lambda network: sides.scaled(network, skip_conditions=[HugeLoss()]),
    "has_aux": lambda network: sides.scaled(Aux(network), has_aux=True),
    "ManualStep": partial(manual, compiled=args.mode == "graph"),
}
NAMES = (
    "BatchNormGradWithActivation",
    "BatchNormGradWithAddAndActivation",
    "BatchNormGrad",
    "ReluGrad",
    "Transpose",
    "TensorMove",
    "Mul",
)
base.use("GPU", args.mode)
print(
    "| setting | kernels | calls of CUDA's libraries | " + " | ".join(NAMES) + " |\n|---|" + "---:|" * (2 + len(NAMES))
)
make, _ = sides.CASES[args.case]
for name in args.settings or SETTINGS:
    try:
        network, inputs = make()
        step = SETTINGS[name](network)
        for _ in range(5):
            step(*inputs)
        mindspore.runtime.synchronize()
        launches.reset()
        step(*inputs)
        mindspore.runtime.synchronize()
        found = Counter(launches.names())
        print(
            f"| {name} | {sum(found.values())} | {sum(dry_gpu.counts().values())} | "
            + " | ".join(str(found[each]) for each in NAMES)
            + " |",
            flush=True,
        )
    except Exception as error:  # of one setting; the others go on
        print(f"| {name} | {type(error).__name__}: {str(error)[:300]!r} |", flush=True)
