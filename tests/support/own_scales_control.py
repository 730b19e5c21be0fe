"""What networks that share a verdict and have loss scales of their own do, by the definition of it."""

import copy

import numpy as np

from support.retried_networks import LEARNING_RATE, overflows


class OwnScalesControl:
    """The laws, the counters and the weights of the networks of one step."""

    def __init__(self, laws, max_retries=0, steps=1):
        self.laws, self.max_retries, self.steps = laws, max_retries, steps
        self.applied_steps = self.skipped_steps = self.consecutive_skipped_steps = self.retries = 0
        self.weights, self.forwards = np.ones(len(laws)), 0
        self.window, self.to_blame = [], [False] * len(laws)
        self.alone_to_blame = 0

    def call(self, slopes):
        """The call's overflow as far as is known, and the scales of its last try."""
        before, tries, first = copy.deepcopy(self.laws), self.max_retries, None
        while True:
            scales = [law.scale for law in self.laws]
            flags = [overflows(scale, slope) for scale, slope in zip(scales, slopes)]
            first = first or flags
            can_mend = any(flags) and all(law.can_back_off() for law, flag in zip(self.laws, flags) if flag)
            if not (can_mend and tries and np.isfinite(slopes).all() and not any(self.to_blame)):
                break
            self._step_laws(flags)
            self.retries += 1
            tries -= 1
        if any(flags):
            self.laws, flags = before, first
        self.to_blame = [earlier or flag for earlier, flag in zip(self.to_blame, flags)]
        overflow = any(self.to_blame)
        self.window.append(slopes)
        if len(self.window) == self.steps:
            self._end()
        return overflow, scales

    def _step_laws(self, flags):
        self.alone_to_blame += any(flags) and not all(flags)
        for law, flag in zip(self.laws, flags):
            if flag or not any(flags):
                law.step(flag)

    def _end(self):
        self._step_laws(self.to_blame)
        if any(self.to_blame):
            self.skipped_steps += 1
            self.consecutive_skipped_steps += 1
        else:
            self.applied_steps += 1
            self.consecutive_skipped_steps = 0
            self.weights = self.weights - LEARNING_RATE * np.mean(self.window, axis=0)
            self.forwards += len(self.window)
        self.window, self.to_blame = [], [False] * len(self.laws)

    def counters(self):
        names = ["applied_steps", "skipped_steps", "consecutive_skipped_steps"]
        names += ["retries"] if self.max_retries else []
        return {name: getattr(self, name) for name in names}
