"""
What MindSpore's PyNative mode keeps of calls that an exception ended.

It goes on casting to the dtype of the cell that the exception came through (`to_float`, or a level of amp) whatever is
computed next, what is assigned to a Parameter too; and it goes on recording for the gradient, after which graph mode
may not differentiate any more ("The node adjoint is null").
"""

# There is no public function that ends either.
from mindspore.ops.composite.base import _pynative_executor


def forget_failed_calls():
    """Ends both. Takes about 0.5 ms where operators still run: once for many Parameters, never in a step that runs."""
    _pynative_executor.clear_res()
