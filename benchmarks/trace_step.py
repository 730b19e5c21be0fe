"""
Follows one step through the package, as a reader of the code would, and counts files, classes and functions.

The step runs in PyNative mode with an optimizer that is not MindSpore's. Then nothing is compiled, and Python sees
every call.
"""

import argparse
import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import ms_lossscale
from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

PACKAGE = str(Path(ms_lossscale.__file__).parent)
STEPS = {
    "plain": {},
    "clipped, averaged, retried": {"clip_norm": 1.0, "ema_decay": 0.99, "max_retries": 1},
}


class Descent(nn.Cell):
    """The simplest optimizer that is not MindSpore's."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.parameters = parameters
        self._rate = Tensor(0.1, mindspore.float32)

    def construct(self, grads):
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, grad * self._rate)


class Trace:
    """
    Records the functions of the package that are called, for `sys.setprofile`.

    Attributes:
        functions (dict): Keys are (file, class, function), in the order of the first calls.
        depth (int): How deep the calls go.
    """

    def __init__(self):
        self.functions, self.depth = {}, 0
        self._present_depth = 0

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            self._present_depth += 1
            self.depth = max(self.depth, self._present_depth)
            owner = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else ""
            self.functions[str(Path(code.co_filename).relative_to(PACKAGE)), owner, code.co_name] = None
        elif event == "return":
            self._present_depth -= 1

    def counts(self):
        """Returns the numbers of files, classes and functions, and the depth."""
        files, classes = ({function[i] for function in self.functions} - {""} for i in (0, 1))
        return len(files), len(classes), len(self.functions), self.depth


def trace_step(**keywords):
    """Traces the third step of a ScaledTrainOneStepCell with a dynamic scale, in PyNative mode."""
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
    parser = argparse.ArgumentParser(description="Follow one step through the package, and count its functions.")
    parser.add_argument("--list", action="store_true", help="list the functions of the plain step in order")
    args = parser.parse_args(arguments)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    traces = {name: trace_step(**keywords) for name, keywords in STEPS.items()}
    print("| step | files | classes | functions | calls deep |")
    print("|---|---:|---:|---:|---:|")
    for name, trace in traces.items():
        print(f"| {name} | {' | '.join(map(str, trace.counts()))} |")
    if args.list:
        for file, owner, function in traces["plain"].functions:
            print(f"{file}: {f'{owner}.' if owner else ''}{function}")


if __name__ == "__main__":
    main()
