"""What is known of tensors' methods and of MindSpore's operators by their names."""

from ms_lossscale.forward_writes.values import NOTHING, TensorMethod, Values

# Besides the methods whose name ends in an underscore.
_WRITERS = ("set_data", "assign_value", "itemset")
# What gives the same memory: writing into the result is writing into the tensor. A cast does so where the type stays,
# and a reshape in PyNative mode.
_SHARING = (
    *("depend", "load", "stopgradient", "identity", "value", "data", "cast", "astype", "to", "float"),
    *("view", "viewas", "reshape", "transpose", "permute", "t", "mt", "flatten", "ravel", "squeeze"),
    *("unsqueeze", "expanddims", "expandas", "narrow", "select", "split", "chunk"),
    *("unbind", "swapaxes", "diagonal", "detach"),
)
_STATISTICS_OF_BATCH_NORM = ("running_mean", "running_var")


def writes_its_tensor(name):
    """Whether a method writes in place."""
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


def shares_memory(name):
    """Whether what a method or an operator returns is its first argument seen otherwise."""
    return name.lower().replace("_", "") in _SHARING


def attribute_of_tensor(tensor, name):
    return Values.of(tensor) if name in ("T", "mT", "data") else Values.of(TensorMethod(tensor, name))


def written_by_batch_norm(args, kwargs):
    """The arguments of MindSpore's functions of that name that they write."""
    return [*args[1:3], *(kwargs.get(name, NOTHING) for name in _STATISTICS_OF_BATCH_NORM)]
