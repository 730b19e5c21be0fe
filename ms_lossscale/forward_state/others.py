"""What functions, classes and primitives of MindSpore's and Python's do with their arguments."""

from mindspore import ops
from mindspore.ops.primitive import Primitive

from ms_lossscale.forward_state.names import WRITES
from ms_lossscale.forward_state.ownership import is_users
from ms_lossscale.forward_state.referents import referents
from ms_lossscale.forward_state.source import declares_writing
from ms_lossscale.forward_state.values import functions_in, of, union


def written_by(function, name, module, args, kwargs):
    """Returns those arguments that a call may write. The name and module are those of the function or its class."""
    given = union(*args, *kwargs.values())
    if name.startswith("batch_norm"):
        return union(*args[1:3], kwargs.get("running_mean", {}), kwargs.get("running_var", {}))
    if name.startswith("load_checkpoint"):
        return given
    if WRITES.fullmatch(name) or module in ("operator", "_operator"):
        return args[0] if args else given
    may_renormalise = "max_norm" in kwargs or (name.startswith("embedding") and len(args) > 3)
    cls = function if isinstance(function, type) else type(function)
    return given if may_renormalise or (issubclass(cls, Primitive) and declares_writing(cls)) else {}


def functions_inside(function):
    """Returns the user's functions that it holds, and may call."""
    held = () if isinstance(function, type) else referents(function)
    if isinstance(function, ops.MultitypeFuncGraph):
        held = [entry[-1] for entry in function.entries]
    # Those of MindSpore's that hold each other would be called without end.
    return {key: each for key, each in functions_in(of(*held)).items() if is_users(each)}
