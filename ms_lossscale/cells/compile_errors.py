"""What MindSpore's errors mean that a training cell's compilation may end with."""

from mindspore import GRAPH_MODE, Parameter, Tensor, get_context, nn

from ms_lossscale._python_objects import attributes_of, is_a, items_of

# Raised for a gradient within a loss, of a cell that another loss calls as well; which of the two depends on the order.
_INNER_GRADIENT = ("Illegal AnfNode", "real_primal_func")

# Raised where a graph runs a function both before a loop and in it, and that passes an attribute of a plain object on;
# the second one where what it passes it to returns it.
_IN_A_LOOP = ("Invalid formal parameter", "Graph cycle exists")

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
    tries_again = any(step.transaction.counters.counts_retries for step in cell.steps)
    if tries_again and any(part in text for part in _IN_A_LOOP):
        return (
            f"For '{name}', MindSpore can't compile the loop of 'max_retries', which runs a network again, if the "
            f"network passes an attribute of an object that is no Cell to a function or method"
            f"{_attributes_of_objects(cell)}. Make it an attribute of the Cell, self.state = holder.state, and pass "
            f"self.state; or read and write holder.state without passing it; or set max_retries=0."
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


def _attributes_of_objects(cell):
    """Names, for a message, the Parameters that objects hold which are attributes of cells and no Cells themselves."""
    found = []
    for _, part in cell.cells_and_names():
        if type(part).__module__.startswith("ms_lossscale."):
            continue
        for name, holder in vars(part).items():
            if not is_a(holder, nn.Cell, Tensor) and not items_of(holder):
                parameters = [attribute for attribute, value in attributes_of(holder) if is_a(value, Parameter)]
                found += [f"self.{name}.{attribute} of {type(part).__name__}" for attribute in parameters]
    return f" ({', '.join(dict.fromkeys(found))})" if found else ""
