"""
What MindSpore's PyNative mode keeps of calls that an exception ended.

It goes on casting to the dtype of the cell that the exception came through (`to_float`, or a level of amp) whatever is
computed next, what is assigned to a Parameter too; and it goes on recording for the gradient, after which graph mode
may not differentiate any more ("The node adjoint is null").
"""

# There is no public function that ends either.
from mindspore.ops.composite.base import _pynative_executor


def forget_failed_calls():
    """Ends both. Not on the hot path: it waits for the operators that still run."""
    _pynative_executor.clear_res()


class _ForgettingIfItFails:
    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            forget_failed_calls()


# A context that ends both if an exception leaves it.
forgetting_if_it_fails = _ForgettingIfItFails()
