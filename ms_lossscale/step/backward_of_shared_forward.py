"""The one place that needs a class of MindSpore that is not public: a backward that shares its forward."""

from mindspore.ops.composite.base import _Grad

# `ops.vjp` is made of it. That one differentiates by all weights in each backward, and compiled code keeps all it
# computes since the forward has side effects: in a GAN, the gradients of the discriminator's weights twice. This one is
# called once for each loss, with the weights of that loss only; `merge_forward` makes all of them share one forward.
backward_of_shared_forward = _Grad(get_by_list=True, sens_param=True, merge_forward=True)
