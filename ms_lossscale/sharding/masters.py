"""Float32 master copies of weights that are not float32, which an optimizer updates in their place."""

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._values import as_array

# What the name of a master begins with, before that of its weight.
MASTER = "master."


def needs_master(weight):
    """Returns whether float32 holds more than the weight does."""
    return weight.dtype in (mstype.float16, mstype.bfloat16)


def updated_for(weight):
    """Returns what an optimizer updates for a weight: its master, which has its name so far, or the weight itself."""
    return Parameter(Tensor(as_array(weight), mstype.float32), name=weight.name) if needs_master(weight) else weight


def take_over(master, value, dtype):
    """
    Writes `value`, what the weight of a master holds, into the master, unless it is the master, rounded: then nothing
    else has written the weight.
    """
    rounded = prim.cast(prim.cast(master, dtype), mstype.float32)
    return prim.assign(master, prim.select(prim.equal(rounded, value), master, value))


@gradients.of_each("Tensor", "Tensor")
def follow(master, weight):
    """Makes each master take over what was written into its weight."""
    return take_over(master, prim.cast(weight, mstype.float32), weight.dtype)


def with_masters(pairs, parameters):
    """Returns a checkpoint with the masters that it lacks, given pairs of a weight and its master: its weights."""
    lacking = {
        master.name: parameters[weight.name]
        for weight, master in pairs
        if master.name not in parameters and weight.name in parameters
    }
    return {**parameters, **lacking}
