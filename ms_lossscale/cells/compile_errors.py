"""What MindSpore's errors mean that a training cell's compilation may end with."""

from mindspore import GRAPH_MODE, get_context

# Raised for a gradient within a loss, of a cell that another loss calls as well; which of the two depends on the order.
_INNER_GRADIENT = ("Illegal AnfNode", "real_primal_func")


_OTHER_FUNCTION = "The parameters number of the function is"


def explanation(cell, error):
    """
    Explains an error of MindSpore for the user of a training cell, if MindSpore's message does not.

    Args:
        cell (TrainingCell): The cell that was called.
        error (Exception): What its call raised.

    Returns:
        str, a sentence for the user; None if there is nothing to add.
    """
    if get_context("mode") != GRAPH_MODE:
        return None
    name = type(cell).__name__
    text = str(error)
    if any(part in text for part in _INNER_GRADIENT):
        return (
            f"For '{name}', MindSpore could not compile a network that takes the gradient of a Cell which another loss "
            f"of the step calls as well (a gradient penalty of a critic, say). Take the gradient of a method of the "
            f"loss cell instead: in its __init__, self.gradient = ops.GradOperation()(self.score), with "
            f"def score(self, x): return self.critic(x)."
        )
    if _OTHER_FUNCTION not in text:
        return None
    for _, part in cell.cells_and_names():
        # Left by `mindspore.jit`: MindSpore then parses that method instead of `construct`.
        compiled = getattr(part, "__parse_method__", "construct")
        if compiled != "construct" and f" : {compiled}_" in text:
            return (
                f"For '{name}', MindSpore can't compile '{type(part).__name__}' into a graph, since '{compiled}' of it "
                f"was compiled by itself, in PYNATIVE_MODE. Call the training cell in one mode only."
            )
    return None
