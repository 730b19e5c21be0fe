"""Where the checks run: the device, the mode, and whether it is the emulated NPU."""

import contextlib
import os

import mindspore
from mindspore import nn

from ms_lossscale import FloatStatusRegister, emulation
from ms_lossscale.overflow_detector import default_overflow_detector

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}


def has_ranks():
    """Whether `msrun` started this process as one of several."""
    return int(os.environ.get("MS_WORKER_NUM", 1)) > 1


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
        return has_ranks()

    def __str__(self):
        return f"{self.target}, emulating a saturation-mode NPU" if self.emulated else self.target
