"""Shows the first steps of two programs side by side, and what changes in a user's code."""

import difflib
import inspect
import textwrap

import numpy as np
from mindspore import Callback
from tabulate import tabulate


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        self.losses.append(float(loss.asnumpy()))


def compare_first_steps(columns, tolerance):
    """
    Prints the losses of the first steps, and exits if they differ.

    Args:
        columns (dict[str, list[float]]): The losses by the step's name. All are compared to the first ones.
        tolerance (float): The largest relative difference that is accepted.

    Raises:
        SystemExit: If a loss differs by more.
    """
    reference, *others = (np.array(losses) for losses in columns.values())
    # NumPy's maximum keeps NaN; Python's does not.
    largest = float(np.max(np.abs(np.array(others) - reference) / np.abs(reference)))
    rows = [(i + 1, *losses) for i, losses in enumerate(zip(*columns.values()))]
    print("\n" + tabulate(rows, ["step", *columns], floatfmt=".6f"))
    print(f"largest relative difference: {largest:.1e} (at most {tolerance:.0e})\n")
    if not largest <= tolerance:
        raise SystemExit(f"The first steps differ by {largest:.1e}, which is more than {tolerance:.0e}.")


def print_changes(before, after):
    """Prints the changes that turn the body of one function into that of another."""
    lines = difflib.unified_diff(_body(before), _body(after), lineterm="", n=1)
    print("\nWhat changes in your code:\n")
    # Without the file names of a diff.
    print("\n".join(line for line in list(lines)[2:] if not line.startswith("@@")))


def _body(function):
    source = inspect.getsource(function)
    return textwrap.dedent(source.split(":\n", 1)[1]).splitlines()
