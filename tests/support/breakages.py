"""Ways to break the package, through what is public, by which the tests show that each check of the self-check can
fail.

`python breakages.py [NAME ...]` breaks it in each of these ways, by default in all but those for ranks. For each it
prints a JSON line: its name, and why each check that must fail does so. `python breakages.py --run NAME ...` breaks it
in one way, and then is the self-check's command."""

import functools
import json
import os
import sys
from typing import Callable, NamedTuple

from mindspore import dtype as mstype
from mindspore import nn, ops

import ms_lossscale
from ms_lossscale import DynamicLossScale, FiniteGradients, FloatStatusRegister, ManualStep, OverflowDetector
from ms_lossscale import ScaledTrainOneStepCell as TrainOneStepCell

CELLS = (TrainOneStepCell, ms_lossscale.SimultaneousTrainOneStepCell, ms_lossscale.AlternatingTrainOneStepCell)
ON_GRADIENTS = (
    "accumulated-gradients-are-averaged",
    "clipping-takes-the-norm-of-unscaled-gradients",
    "gradients-are-divided-by-the-scale",
)
ON_OVERFLOWS = (
    *("a-retry-saves-the-batch", "a-skipped-step-lowers-the-scale-at-once", "an-overflow-in-the-backward-is-seen"),
    *("an-overflow-in-the-forward-is-seen", "finite-steps-are-not-flagged", "networks-share-one-overflow-check"),
    *("phases-are-told-apart", "what-no-scale-can-mend-is-skipped"),
)


class Breakage(NamedTuple):
    """A function that breaks the package in this process, the checks that then fail, and on which device."""

    apply: Callable
    checks: tuple
    where: str = "cpu"


def replace(owner, method, replacement):  # Replaces a method. The replacement gets the original method first.
    original = getattr(owner, method)
    replaced = functools.wraps(original)(lambda *args, **keywords: replacement(original, *args, **keywords))
    setattr(owner, method, replaced)


def do_after(owner, method, action):
    """Makes a method do something more at its end. The action gets the object and the output."""

    def both(original, self, *args, **keywords):
        output = original(self, *args, **keywords)
        action(self, output)
        return output

    replace(owner, method, both)


def keywords(*classes, **changes):
    """Returns a function that makes constructors take other values for keywords, functions of what was passed."""

    def init(original, self, *args, **passed):
        original(self, *args, **{**passed, **{name: change(passed.get(name)) for name, change in changes.items()}})

    return lambda: [replace(each, "__init__", init) for each in classes]


class Multiplied(nn.Cell):  # Multiplies gradients.
    def construct(self, grads):
        multiplied = ()
        for grad in grads:
            multiplied += (grad * 1024.0,)
        return multiplied


class Blind(OverflowDetector):  # Sees no overflow.
    def construct(self, grads):
        return ops.logical_and(ops.isfinite(grads[0].sum()), ops.isnan(grads[0].sum()))


class Twice(nn.Cell):  # Runs a network twice.
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return 0.5 * self.network(*inputs) + 0.5 * self.network(*inputs)


BOUNDS = ("a-dynamic-scale-keeps-its-bounds",)
BREAKAGES = {
    "a_longer_window": Breakage(
        keywords(DynamicLossScale, scale_window=lambda its: its + 1),
        ("a-dynamic-scale-keeps-its-bounds", "a-dynamic-scale-moves-as-that-of-others", "hysteresis-waits"),
    ),
    "no_hysteresis": Breakage(keywords(DynamicLossScale, hysteresis=lambda _: 1), ("hysteresis-waits",)),
    "no_bounds": Breakage(
        keywords(DynamicLossScale, min_loss_scale=lambda _: 2.0**-99, max_loss_scale=lambda _: 2.0**99), BOUNDS
    ),
    "gradients_are_not_divided": Breakage(keywords(*CELLS, gradient_transforms=lambda _: [Multiplied()]), ON_GRADIENTS),
    "an_average_stands": Breakage(
        keywords(TrainOneStepCell, ema_decay=lambda _: 1 - 1e-12),
        ("a-skipped-step-leaves-every-parameter", "averages-follow-the-weights"),
    ),
    "no_overflow_is_seen": Breakage(
        keywords(*CELLS, ManualStep, overflow_detector=lambda _: Blind()),
        (*ON_OVERFLOWS, "a-step-around-ones-own-backward-is-a-transaction"),
    ),
    "another_detector": Breakage(
        keywords(*CELLS, overflow_detector=lambda _: FiniteGradients()),
        (*ON_OVERFLOWS, "the-detector-sees-what-this-device-makes-of-an-overflow"),
        "emulated",
    ),
    "gradients_are_not_exchanged": Breakage(
        keywords(TrainOneStepCell, gradients_reduced=lambda _: True),
        ("an-overflow-on-one-rank-skips-the-step-on-all",),
        "ranks",
    ),
}


def breaks(*checks, where="cpu"):  # Makes a Breakage of a function.
    return lambda function: BREAKAGES.setdefault(function.__name__, Breakage(function, checks, where))


@breaks("fixed-and-scheduled-scales-ignore-overflows")
def a_scheduled_scale_backs_off():
    def adjust(original, self, grads_finite):
        original(self, grads_finite)
        self.set_loss_scale(self.get_loss_scale() * (1.0 if grads_finite else 0.5))

    replace(ms_lossscale.ScheduledLossScale, "adjust", adjust)


@breaks("float16-gradients-are-divided-in-float32")
def gradients_are_divided_in_float16():
    def rounded(original, *args):
        return original(*args).astype(mstype.float16).astype(mstype.float32)

    replace(ms_lossscale.LossScale, "unscale", rounded)


@breaks("a-checkpoint-continues-bit-for-bit")
def a_cycle_is_not_loaded():
    def load(original, self, parameters):
        original(self, {name: its for name, its in parameters.items() if "accumulation." not in name}, strict=False)

    replace(TrainOneStepCell, "load_state_dict", load)


@breaks("a-compiled-for-loop-makes-the-same-steps", "a-compiled-while-loop-makes-the-same-steps")
def the_host_does_a_part_of_each_step():
    do_after(TrainOneStepCell, "__call__", lambda self, _: self.set_loss_scale(64.0))


@breaks("a-step-costs-little-more-than-an-unscaled-one")
def a_network_runs_twice_in_each_step():
    def init(original, self, network, *args, **passed):
        original(self, Twice(network), *args, **passed)

    replace(TrainOneStepCell, "__init__", init)


@breaks("sink-mode-makes-the-same-steps")
def model_changes_the_cell():
    do_after(TrainOneStepCell, "set_train", lambda self, _: self.set_loss_scale(2 * self.get_loss_scale()))


@breaks("a-skipped-step-leaves-every-parameter", "networks-share-one-overflow-check")
def a_skipped_step_changes_all():
    def change(self, output):
        for parameter in self.get_parameters():
            if bool(output[1]) and parameter.dtype == mstype.float32:
                ops.assign(parameter, parameter + 1)

    for each in CELLS[:2]:
        do_after(each, "__call__", change)


@breaks("large-finite-gradients-are-not-flagged")
def a_sum_that_overflows_counts():
    FiniteGradients.construct = lambda self, grads: ops.logical_not(ops.isfinite(grads[0].sum()))


@breaks(
    "an-overflow-before-a-step-is-not-the-steps", "a-step-around-ones-own-backward-is-a-transaction", where="emulated"
)
def the_register_is_not_cleared():
    FloatStatusRegister.start = OverflowDetector.start


@breaks(*ON_OVERFLOWS, "a-skipped-step-leaves-every-parameter", "reading-the-register-consumes-it", where="emulated")
def the_register_is_read_twice():
    replace(ms_lossscale.emulation.Register, "read", lambda read, self: (read(self), read(self))[1])


@breaks("sharing-the-optimizers-state-changes-no-weight", where="ranks")
def shards_learn_faster():
    def init(original, self, weights, _):
        original(self, weights, lambda shards: nn.AdamWeightDecay(shards, 0.02))

    replace(ms_lossscale.ShardedOptimizer, "__init__", init)


def reasons_of(breakage):
    from ms_lossscale.selfcheck.checks import CHECKS
    from ms_lossscale.selfcheck.device import Device, start

    breakage.apply()
    device = Device(start("CPU"), "graph", breakage.where == "emulated")
    return {check.name: check.reason_against(device) for check in CHECKS if check.name in breakage.checks}


def main(names):
    if names[:1] == ["--run"]:
        from ms_lossscale.selfcheck.__main__ import main

        BREAKAGES[names[1]].apply()
        return main(names[2:])
    for name in names or [name for name, its in BREAKAGES.items() if its.where != "ranks"]:
        # Each in a process of its own; MindSpore is imported once.
        child = os.fork()
        if child == 0:
            print(json.dumps((name, reasons_of(BREAKAGES[name]))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            return f"{name}: the process of its checks failed"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
