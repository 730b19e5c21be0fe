"""Errors of MindSpore that do not say what is wrong, explained."""

import numpy as np
from mindspore import GRAPH_MODE, get_context

# Raised for a gradient within a loss, of a cell that another loss calls as well; which of the two depends on the order.
_INNER_GRADIENT = ("Illegal AnfNode", "real_primal_func")
# Raised where a graph runs a function both before a loop and in it, and that passes an attribute of a plain object on;
# the second one where what it passes it to returns it.
_IN_A_LOOP = ("Invalid formal parameter", "Graph cycle exists")
_OTHER_FUNCTION = "The parameters number of the function is"


def explanation(cell, inputs, text, has_company):
    """Returns a sentence for the user on an error of MindSpore, None if there is nothing to add."""
    arrays = [i for i, value in enumerate(inputs) if isinstance(value, np.ndarray)]
    if arrays:
        return (
            f"input {arrays[0]} is a numpy.ndarray, and networks compute with Tensors: pass mindspore.Tensor(array), "
            f"or iterate over a dataset without output_numpy=True."
        )
    return _of_graph_mode(cell, text, has_company) if get_context("mode") == GRAPH_MODE else None


def _of_graph_mode(cell, text, has_company):
    if has_company:
        return (
            "another thread called a training cell at the same time, and MindSpore can't compile in two threads at "
            "once: its own cells fail then, too. Call training cells in one thread at a time. If both were called "
            "before, the error above says what is wrong."
        )
    if any(part in text for part in _INNER_GRADIENT):
        return (
            "MindSpore could not compile a network that takes the gradient of a Cell which another loss of the step "
            "calls as well (a gradient penalty of a critic, say). Take the gradient of a method of the loss cell "
            "instead: in its __init__, self.gradient = ops.GradOperation()(self.score), with "
            "def score(self, x): return self.critic(x)."
        )
    tries_again = any(step.transaction.counters.counts_retries for step in cell._steps)
    if tries_again and any(part in text for part in _IN_A_LOOP):
        return (
            "MindSpore can't compile the loop of 'max_retries', which runs a network again, if the network passes a "
            "Parameter of an object that is no Cell to a function or method. Make it an attribute of the Cell, "
            "self.state = holder.state, and pass self.state; or read and write holder.state without passing it; or set "
            "max_retries=0."
        )
    for _, part in cell.cells_and_names():
        # Left by `mindspore.jit`: MindSpore then parses that method instead of `construct`.
        compiled = getattr(part, "__parse_method__", "construct")
        if _OTHER_FUNCTION in text and compiled != "construct" and f" : {compiled}_" in text:
            return (
                f"MindSpore can't compile '{type(part).__name__}' into a graph, since '{compiled}' of it was compiled "
                f"by itself, in PYNATIVE_MODE. Call the training cell in one mode only."
            )
    return None
