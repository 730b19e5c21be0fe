"""What MindSpore's PyNative mode keeps of calls that an exception ended."""

from mindspore.common.api import _pynative_executor


class _ForgetFailedCalls:
    """
    A context that ends what PyNative mode began in calls that an exception leaves.

    MindSpore leaves both open: it goes on recording for the gradient, after which graph mode may not differentiate any
    more ("The node adjoint is null"), and it goes on casting to the dtype of the cell that the exception came through
    (`to_float`, or a level of amp), whatever is computed next. It has no public function for that.
    """

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            _pynative_executor.clear_res()


forget_failed_calls = _ForgetFailedCalls()
