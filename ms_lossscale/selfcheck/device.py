"""Where the checks run: the device, the mode, and whether it is the emulated NPU."""

import contextlib
import os
import platform

import mindspore
from mindspore import nn

from ms_lossscale import FloatStatusRegister, emulation
from ms_lossscale.overflow_detector import default_overflow_detector

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}


class CouldNotRun(Exception):
    """Nothing can be checked, or nothing more."""


def is_rank():
    """Whether `msrun` started this process as one of several."""
    return int(os.environ.get("MS_WORKER_NUM", 1)) > 1


def leave_ranks():
    """Makes of this process, and of those that it starts from now on, one that runs alone."""
    for name in ("MS_WORKER_NUM", "MS_ROLE"):
        os.environ.pop(name, None)


def start(target, emulate):
    """Makes MindSpore use the device. Returns its name."""
    try:
        if target is not None:
            mindspore.set_device(target)
        target = mindspore.get_context("device_target")
        # Only now it is known whether this MindSpore can compute there.
        (mindspore.Tensor([1.0]) + 1.0).asnumpy()
        if is_rank():
            mindspore.communication.init()
    except (RuntimeError, ValueError, TypeError) as error:
        raise CouldNotRun(f"MindSpore can't use the device {target}: {str(error).splitlines()[0]}") from None
    return target


class Device:
    """What a check needs to know of the device: its name, MindSpore's mode, and whether it is the emulated NPU."""

    def __init__(self, target, mode, emulated):
        self.target, self.mode, self.emulated = target, mode, emulated

    @contextlib.contextmanager
    def in_use(self):
        """A context in which a check runs."""
        before = mindspore.get_context("mode")
        mindspore.set_context(mode=MODES[self.mode])
        try:
            with emulation.saturation_mode() if self.emulated else contextlib.nullcontext():
                yield
        finally:
            mindspore.set_context(mode=before)

    def arithmetic(self, name):
        """What float16 values go through: the emulated NPU's arithmetic, or the device's own."""
        return emulation.Saturate(name) if self.emulated else nn.Identity()

    @property
    def has_register(self):
        """Whether a status register is what shows an overflow here."""
        return isinstance(default_overflow_detector(), FloatStatusRegister)

    @property
    def gradients_show_it(self):
        """Whether an overflow becomes inf or NaN here."""
        return not self.has_register

    @property
    def has_ranks(self):
        """Whether there are other ranks."""
        return is_rank()

    @property
    def chip(self):
        """What the device calls itself."""
        if self.target == "CPU":
            return platform.processor() or platform.machine()
        try:
            return mindspore.hal.get_device_name(0, self.target)
        except (AttributeError, RuntimeError, ValueError):
            return "unknown chip"

    def __str__(self):
        return f"{self.target}, emulating a saturation-mode NPU" if self.emulated else self.target
