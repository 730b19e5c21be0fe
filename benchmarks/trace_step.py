"""
Follows one step through the package, as a reader of the code would, and counts what it passes.

The step runs in PyNative mode, with an optimizer of one's own: nothing of it is compiled then, so that Python sees
every call.
"""

import argparse
import inspect
import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import ms_lossscale
from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

PACKAGE = str(Path(ms_lossscale.__file__).parent)
# What a step is made of besides the plain one.
WITH = {"clip_norm": 1.0, "ema_decay": 0.99, "max_retries": 1}


class Descent(nn.Cell):
    """The simplest optimizer of one's own."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.parameters = parameters
        self._rate = Tensor(0.1, mindspore.float32)

    def construct(self, grads):
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, grad * self._rate)


class Trace:
    """Collects the functions of the package that are called, each with its class, and how deep the calls go."""

    def __init__(self):
        self.functions, self.calls, self.depth = [], 0, 0
        self._stack = []

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            self._stack.append(frame)
            self.calls, self.depth = self.calls + 1, max(self.depth, len(self._stack))
            file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            function = (file, type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else "", _name(frame))
            if function not in self.functions:
                self.functions.append(function)
        elif event == "return" and self._stack:
            self._stack.pop()

    def counts(self):
        files, classes = ({function[i] for function in self.functions} - {""} for i in (0, 1))
        return len(files), len(classes), len(self.functions), self.depth


def _name(frame):
    return frame.f_code.co_name


def trace_step(**keywords):
    """The trace of the third step of a ScaledTrainOneStepCell with a dynamic scale, in PyNative mode."""
    network = nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss())
    optimizer = Descent(mindspore.ParameterTuple(network.trainable_params()))
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()
    inputs = [Tensor(np.ones(shape, np.float32)) for shape in ((2, 4), (2, 1))]
    for _ in range(2):
        cell(*inputs)
    trace = Trace()
    sys.setprofile(trace)
    try:
        cell(*inputs)
    finally:
        sys.setprofile(None)
    return trace


def main(arguments=None):
    """Runs the command."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__))
    parser.add_argument("--list", action="store_true", help="list the functions of the plain step in their order")
    args = parser.parse_args(arguments)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    print("| step | files | classes | functions | calls deep |")
    print("|---|---:|---:|---:|---:|")
    for name, keywords in (("plain", {}), (", ".join(f"{name}={value}" for name, value in WITH.items()), WITH)):
        trace = trace_step(**keywords)
        print(f"| {name} | {' | '.join(map(str, trace.counts()))} |")
        if args.list and not keywords:
            plain = trace
    if args.list:
        print(*(": ".join((file, ".".join(filter(None, names)))) for file, *names in plain.functions), sep="\n")


if __name__ == "__main__":
    main()
