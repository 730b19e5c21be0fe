"""
Ways to break the package, and which checks of the self-check must then go red.

    python mutations.py MUTATION

breaks it in this process (what one mutation had MindSpore compile could reach the next), runs the checks, but for slow
ones, and prints the results as JSON.
"""

import json
import os
import sys
import time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore
from mindspore import Tensor, ops
from mindspore import dtype as mstype

import ms_lossscale
from ms_lossscale import _gradients as gradients
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.loss_scale import DynamicLossScale, ScheduledLossScale
from ms_lossscale.overflow_detector import FiniteGradients, FloatStatusRegister
from ms_lossscale.selfcheck.checks import CHECKS
from ms_lossscale.selfcheck.command_line import result_of
from ms_lossscale.selfcheck.device import Device, has_ranks
from ms_lossscale.step.forward_state import ForwardState
from ms_lossscale.step.moving_average import MovingAverage
from ms_lossscale.step.packing import Unpacked
from ms_lossscale.step.ranks import Ranks
from ms_lossscale.step.scaling import Scaling, Unscale
from ms_lossscale.step.update import UpdateOrUndo
from ms_lossscale.step.verdict import AskEach
from ms_lossscale.step.window import WindowState

# Functions and not lambdas: graph mode reads their sources.


def blind(self, grads, overflows):
    are_finite = self.packing.check(grads)
    return ops.ReduceAny()(ops.logical_and(are_finite, ops.logical_not(are_finite))), (are_finite,)


def sums_decide(tensors):
    return ops.isfinite(ops.stack(gradients.sums(tensors)))


def read_twice(self, grads):
    status = self._get_status(ops.depend(self._no_status, grads))
    status = self._get_status(ops.depend(self._no_status, status))
    return ops.ReduceAny()(ops.not_equal(status, self._no_status))


def uncleared(self, inputs):
    return inputs


def forgotten(self, saved):
    pass


def always(self, overflow, grads, flags, saved):
    return ops.depend(overflow, self.update(grads))


def reversed_flags(self, flags):
    return ops.flip(flags, (0,))


def one_late(self, loss_scale, overflow):
    clean = ops.select(overflow, self._no_steps, self.clean_steps + self._one_step)
    grows = clean > self._window
    bad = ops.select(overflow, self.overflow_steps + self._one_step, self._no_steps)
    backs_off = bad >= self._hysteresis
    next_scale = ops.select(grows, ops.minimum(loss_scale * self._factor, self._ceiling), loss_scale)
    next_scale = ops.select(backs_off, ops.maximum(loss_scale * self._backoff, self._floor), next_scale)
    next_scale = ops.depend(next_scale, ops.assign(self.clean_steps, ops.select(grows, self._no_steps, clean)))
    return ops.depend(next_scale, ops.assign(self.overflow_steps, ops.select(backs_off, self._no_steps, bad)))


def without_bounds(self, loss_scale, overflow):
    clean = ops.select(overflow, self._no_steps, self.clean_steps + self._one_step)
    grows = clean >= self._window
    bad = ops.select(overflow, self.overflow_steps + self._one_step, self._no_steps)
    backs_off = bad >= self._hysteresis
    next_scale = ops.select(grows, loss_scale * self._factor, loss_scale)
    next_scale = ops.select(backs_off, loss_scale * self._backoff, next_scale)
    next_scale = ops.depend(next_scale, ops.assign(self.clean_steps, ops.select(grows, self._no_steps, clean)))
    return ops.depend(next_scale, ops.assign(self.overflow_steps, ops.select(backs_off, self._no_steps, bad)))


def impatient(self, loss_scale, overflow):
    smaller = ops.maximum(loss_scale * self._backoff, self._floor)
    clean = ops.select(overflow, self._no_steps, self.clean_steps + self._one_step)
    grows = clean >= self._window
    next_scale = ops.select(grows, ops.minimum(loss_scale * self._factor, self._ceiling), loss_scale)
    next_scale = ops.select(overflow, smaller, next_scale)
    return ops.depend(next_scale, ops.assign(self.clean_steps, ops.select(grows, self._no_steps, clean)))


def halved(self, loss_scale, overflow):
    return ops.select(overflow, loss_scale * 0.5, loss_scale)


def in_float16(tensors, factor):
    if not isinstance(tensors, (tuple, list)):
        return (tensors * factor.astype(mstype.float16)).astype(mstype.float32)
    products = ()
    for tensor in tensors:
        products += ((tensor.astype(mstype.float16) * factor.astype(mstype.float16)).astype(mstype.float32),)
    return products


def undivided(self, grads, scale):
    return gradients.multiply(grads, self._share), self._one


def unaveraged(self, grads, scale):
    return gradients.multiply(grads, self._one / scale), self._one


def swapped(self):
    return gradients.average(self._rest, self._decay, self.averages, self.weights)


def standing(self):
    return self.averages[0]


def not_counted(self, grads, overflow):
    gradients.assign_add(self.gradients, grads)
    ops.assign(self.overflow, overflow)
    ops.assign(self.count.value, self.count._full)


def hopeless(self, scale, overflow):
    return ops.logical_and(overflow, ops.logical_not(overflow))


def wrong_detector():
    return FiniteGradients()


def without_buffers(owner, own, parameters, strict):
    for name, parameter in own.items():
        if not name.startswith("accumulation."):
            parameter.set_data(parameters[name])
    return [], []


def slow(self, *args, **kwargs):
    time.sleep(0.2)
    return CALL(self, *args, **kwargs)


def host_counts(self, *args, **kwargs):
    output = CALL(self, *args, **kwargs)
    for parameter in self.get_parameters():
        if parameter.name.endswith("clean_steps"):
            parameter.set_data(Tensor(0, mstype.int32))
    return output


def not_exchanged(self, grads):
    return grads


def changed_by_model(self, mode=True):
    # Model calls it again.
    if getattr(self, "is_set", False):
        self.set_loss_scale(2 * self.get_loss_scale())
    self.is_set = True
    return SET_TRAIN(self, mode)


CALL, SET_TRAIN = TrainingCell.__call__, TrainingCell.set_train
# Red where no overflow is seen, but for one that clips by the norm, which tells by itself.
BLIND = {
    "an-overflow-in-the-forward-is-seen",
    "an-overflow-in-the-backward-is-seen",
    "finite-steps-are-not-flagged",
    "a-skipped-step-lowers-the-scale-at-once",
    "phases-are-told-apart",
    "networks-share-one-verdict",
    "a-retry-saves-the-batch",
    "what-no-scale-can-mend-is-skipped",
}
UNSCALED = {"gradients-are-divided-by-the-scale", "accumulated-gradients-are-averaged"}
# The topics of these take long; they run only where they are to go red.
SLOW = ("loops", "resume", "cost")
# For each the patches, whether on the emulated NPU, and the checks that go red.
MUTATIONS = {
    "no overflow is seen": ([(AskEach, "construct", blind)], False, BLIND),
    "a sum that overflows counts": (
        [(gradients, "check_large", sums_decide)],
        False,
        {"large-finite-gradients-are-not-flagged"},
    ),
    "the register is read twice": (
        [(FloatStatusRegister, "construct", read_twice)],
        True,
        BLIND | {"a-skipped-step-leaves-every-parameter", "reading-the-register-consumes-it"},
    ),
    "the register is not cleared": (
        [(FloatStatusRegister, "start", uncleared)],
        True,
        {"an-overflow-before-a-step-is-not-the-steps"},
    ),
    "another detector is chosen": (
        [(ms_lossscale.step.settings, "default_overflow_detector", wrong_detector)],
        True,
        BLIND | {"the-detector-sees-what-this-device-makes-of-an-overflow"},
    ),
    "what the forward wrote is not put back": (
        [(ForwardState, "restore", forgotten)],
        False,
        {"a-skipped-step-leaves-every-parameter"},
    ),
    "a step that overflowed updates": (
        [(UpdateOrUndo, "construct", always)],
        False,
        {
            "a-skipped-step-leaves-every-parameter",
            "an-overflow-in-the-backward-is-seen",
            "networks-share-one-verdict",
            "what-no-scale-can-mend-is-skipped",
        },
    ),
    "the wrong weights are named": (
        [(Unpacked, "by_weight", reversed_flags)],
        False,
        {"an-overflow-in-the-backward-is-seen"},
    ),
    "the dynamic law is off by one": (
        [(DynamicLossScale, "next_scale", one_late)],
        False,
        {"the-dynamic-law-is-that-of-others", "the-dynamic-law-keeps-its-bounds", "hysteresis-waits"},
    ),
    "the dynamic law has no bounds": (
        [(DynamicLossScale, "next_scale", without_bounds)],
        False,
        {"the-dynamic-law-keeps-its-bounds"},
    ),
    "hysteresis does not wait": ([(DynamicLossScale, "next_scale", impatient)], False, {"hysteresis-waits"}),
    "a scheduled scale backs off": (
        [(ScheduledLossScale, "next_scale", halved)],
        False,
        {"fixed-and-scheduled-scales-ignore-overflows"},
    ),
    "a gradient is divided in float16": (
        [(gradients, "multiply", in_float16)],
        False,
        UNSCALED | {"float16-gradients-are-divided-in-float32", "clipping-takes-the-norm-of-unscaled-gradients"},
    ),
    "gradients are not divided": (
        [(Unscale, "construct", undivided)],
        False,
        UNSCALED | {"averages-follow-the-weights"},
    ),
    "a window is not averaged": ([(Unscale, "construct", unaveraged)], False, {"accumulated-gradients-are-averaged"}),
    "a window ends early": ([(WindowState, "add", not_counted)], False, {"accumulated-gradients-are-averaged"}),
    "an average takes the wrong share": (
        [(MovingAverage, "construct", swapped)],
        False,
        {"averages-follow-the-weights"},
    ),
    "an average stands": (
        [(MovingAverage, "construct", standing)],
        False,
        {"averages-follow-the-weights", "an-applied-step-moves-them"},
    ),
    "a window is not loaded": (
        [(ms_lossscale.cells.training_cell, "load_in_place", without_buffers)],
        False,
        {"a-new-cell-continues-bit-for-bit", "a-running-cell-continues-bit-for-bit"},
    ),
    "no step is tried again": ([(Scaling, "can_mend", hopeless)], False, {"a-retry-saves-the-batch"}),
    "the host does a part of each step": (
        [(TrainingCell, "__call__", host_counts)],
        False,
        {"a-compiled-for-loop-makes-the-same-steps", "a-compiled-while-loop-makes-the-same-steps"},
    ),
    "Model changes the cell": (
        [(TrainingCell, "set_train", changed_by_model)],
        False,
        {"sink-mode-makes-the-same-steps"},
    ),
    "each step takes long": (
        [(TrainingCell, "__call__", slow)],
        False,
        {"a-step-costs-little-more-than-an-unscaled-one"},
    ),
}
# Under msrun, of which only the check of the ranks is run.
MUTATIONS_OF_RANKS = {
    "gradients are not exchanged": (
        [(Ranks, "reduce", not_exchanged)],
        False,
        {"an-overflow-on-one-rank-skips-the-step-on-all"},
    ),
}


def main():
    patches, emulated, expected = {**MUTATIONS, **MUTATIONS_OF_RANKS}[sys.argv[1]]
    if has_ranks():
        mindspore.communication.init()
    for owner, name, value in patches:
        setattr(owner, name, value)
    device, results = Device("CPU", "graph", emulated), []
    for check in CHECKS:
        with device.in_use():
            is_slow = check.run.__module__.rpartition(".")[2] in SLOW
            is_chosen = check.name in expected or (not is_slow and not has_ranks())
            if is_chosen and all(getattr(device, need) for need in check.needs):
                results.append(result_of(check, device))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
