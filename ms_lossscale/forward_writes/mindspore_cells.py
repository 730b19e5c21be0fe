"""What is known of MindSpore's own cells and functions without reading them."""

from mindspore import Parameter

# The statistics of MindSpore's normalisation cells (`nn` and `mint.nn`) and of users' own cells that name theirs alike.
_STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked")
# What THOR's layers gather for their optimizer.
_THOR_MODULE = "mindspore.nn.layer.thor_layer"
_THOR = ("matrix_a", "matrix_g", "matrix_a_cov", "matrix_g_cov", "a_normalizer", "g_normalizer")


def is_of_mindspore(thing):
    """Whether a class, a function or an object's class is MindSpore's or this package's."""
    module = getattr(thing, "__module__", None) or ""
    if module.startswith("ms_lossscale.selfcheck."):
        # Stands for a user's.
        return False
    return module.partition(".")[0] in ("mindspore", "ms_lossscale", "_c_expression")


def parameters_written_by_name(cell):
    """The frozen Parameters of a cell that its forward is known to write by their names."""
    names = _STATISTICS + (_THOR if type(cell).__module__ == _THOR_MODULE else ())
    found = (getattr(cell, name, None) for name in names)
    return [thing for thing in found if isinstance(thing, Parameter) and not thing.requires_grad]
