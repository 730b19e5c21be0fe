"""Looks at a call: at its inputs, at what a loop passes on of its outputs, and at errors of its compilation."""

import numbers

import numpy as np
from mindspore import GRAPH_MODE, Parameter, Tensor, get_context, nn
from mindspore import dtype as mstype

from ms_lossscale._arguments import listed
from ms_lossscale._output import warn_user
from ms_lossscale._python_objects import attributes_of, is_a, items_of
from ms_lossscale._values import is_float
from ms_lossscale.function_network import misfit, name_of
from ms_lossscale.step.forward_backward import inputs_of

# How many more inputs a network is tried with.
_MORE_INPUTS = 20
_DEPEND_ON_MODE = ("Dropout", "BatchNorm", "SyncBatchNorm")


def check_inputs(cell, inputs, keywords):
    """Raises for a number of inputs that a network surely can't take."""
    owner = type(cell).__name__
    networks = [network for step in cell._steps for network in step.networks_run.networks()]
    if not cell._fitting:
        warn_of_evaluation_mode(owner, networks)
    # The construct of a user's subclass may pass on others than it takes.
    if not type(cell).construct.__module__.startswith("ms_lossscale."):
        return
    if keywords:
        raise TypeError(f"For '{owner}', inputs are passed by position, but got {', '.join(keywords)} by keyword.")
    for i, network in enumerate(networks):
        count = len(inputs_of(owner, i, cell.network_inputs, inputs))
        taken = misfit(network, count)
        if taken is not None:
            raise TypeError(
                f"For '{owner}', network {i}, '{name_of(network)}', takes {taken}, but it gets {count} of "
                f"{len(inputs)} inputs. {_cure(network, inputs, count, taken)}"
                f"{' Or network_inputs=[(0, 1), (1,)] says which takes which.' if len(networks) > 1 else ''}"
            )


def _cure(network, inputs, count, taken):
    """Returns what to do about a network that can't take `count` of these inputs."""
    batch = inputs[0] if len(inputs) == 1 else None
    if isinstance(batch, (list, tuple, dict)) and misfit(network, len(batch)) is None:
        return f"Pass the items of a batch one by one, cell(*batch{'.values()' if isinstance(batch, dict) else ''})."
    if any(misfit(network, more) is None for more in range(count + 1, count + _MORE_INPUTS)):
        return f"Pass all that it takes, cell{taken}. Model needs Model(cell) without loss_fn."
    return (
        "Pass a network that takes all of them and returns the loss: nn.WithLossCell(network, loss_fn), where the "
        "network takes one input, else a Cell or function of your own."
    )


def warn_of_evaluation_mode(owner, networks):
    """
    Warns if no cell of the networks is in training mode, and some of MindSpore's compute something else there. Where
    one is in training mode, the user or Model has called `set_train()`, and chose the others' modes.
    """
    named = {id(cell): (name, cell) for network in networks for name, cell in network.cells_and_names()}.values()
    kinds = [(name or "the network", type(cell).__name__) for name, cell in named]
    concerned = [f"{name} ({kind})" for name, kind in kinds if kind.startswith(_DEPEND_ON_MODE)]
    if concerned and not any(cell.training for _, cell in named):
        warn_user(
            f"For '{owner}', all cells of the network are in evaluation mode, in which dropout drops nothing, and a "
            f"normalisation neither uses the batch's statistics nor moves its own: {listed(concerned, 5)}. "
            f"Call cell.set_train() before the first step. If it is on purpose, call cell.set_train(), and then "
            f"set_train(False) of these cells.",
            UserWarning,
        )


_DTYPES = {"overflow": mstype.bool_, "loss_scale": mstype.float32, "losses": mstype.float32}


def check_outputs(owner, cell, outputs, shapes):
    """
    Raises a ValueError unless these are what the cell, given by its name, returned: a loss, and what the dict `shapes`
    names, in its order.
    """
    wanted = [(_DTYPES[name], shape) for name, shape in shapes.items()]
    forms = [(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else None for value in outputs[1:]]
    if not outputs or not is_float(outputs[0]) or forms[: len(wanted)] != wanted:
        words = [f"'{name}', {dtype} of shape {shape}" for name, (dtype, shape) in zip(shapes, wanted)]
        raise ValueError(
            f"For '{owner}', there must be all {1 + len(wanted)} Tensors that the {cell} returns, in this order: the "
            f"loss; {'; '.join(words)}; but got {_described(outputs)}. Pass what the call of the watched cell "
            f"returned: {owner.split('.')[-1]}(*cell(x, y))."
        )


def check_loss_and_overflow(owner, outputs):
    """Raises a ValueError unless these are the loss of a ManualStep and what its `end` returned."""
    fit = len(outputs) >= 2 and _is_number(outputs[0]) and _is_flag(outputs[1])
    if not fit or any(output is not None for output in outputs[2:]):
        raise ValueError(
            f"For '{owner}', with a ManualStep there must be two values, the loss and what 'end' returned, a bool, in "
            f"this order, but got {_described(outputs)}: {owner.split('.')[-1]}(loss, overflow)."
        )


def _is_number(value):
    """Returns whether it is a number, or an array of numbers, and no bool."""
    if isinstance(value, Tensor):
        return value.dtype != mstype.bool_
    return isinstance(value, (numbers.Real, np.ndarray)) and np.asarray(value).dtype.kind in "fiu"


def _is_flag(value):
    """Returns whether it is one bool."""
    if isinstance(value, Tensor):
        return value.dtype == mstype.bool_ and value.size == 1
    return isinstance(value, (bool, np.bool_, np.ndarray)) and np.asarray(value).dtype == bool and np.size(value) == 1


def _described(values):
    forms = [
        f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else repr(value)
        for value in values
    ]
    return f"{len(values)}: {'; '.join(forms)}" if values else "none"


# Raised for a gradient within a loss, of a cell that another loss calls as well; which of the two depends on the order.
_INNER_GRADIENT = ("Illegal AnfNode", "real_primal_func")

# Raised where a graph runs a function both before a loop and in it, and that passes an attribute of a plain object on;
# the second one where what it passes it to returns it.
_IN_A_LOOP = ("Invalid formal parameter", "Graph cycle exists")

_OTHER_FUNCTION = "The parameters number of the function is"


def explanation(cell, error, has_company):
    """
    Explains an error of MindSpore for the user of a training cell, if MindSpore's message does not.

    Args:
        cell (TrainingCell): The cell that was called.
        error (Exception): What its call raised.
        has_company (bool): Whether another thread called a training cell meanwhile.

    Returns:
        str, a sentence for the user; None if there is nothing to add.
    """
    if get_context("mode") != GRAPH_MODE:
        return None
    name = type(cell).__name__
    if has_company:
        return (
            f"For '{name}', another thread called a training cell at the same time, and MindSpore can't compile in two "
            f"threads at once: its own cells fail then, too. Make the first call of each cell in one thread, one after "
            f"the other, before the others start. If both were called before, the error above says what is wrong."
        )
    text = str(error)
    if any(part in text for part in _INNER_GRADIENT):
        return (
            f"For '{name}', MindSpore could not compile a network that takes the gradient of a Cell which another loss "
            f"of the step calls as well (a gradient penalty of a critic, say). Take the gradient of a method of the "
            f"loss cell instead: in its __init__, self.gradient = ops.GradOperation()(self.score), with "
            f"def score(self, x): return self.critic(x)."
        )
    tries_again = any(step.transaction.counters.counts_retries for step in cell._steps)
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
