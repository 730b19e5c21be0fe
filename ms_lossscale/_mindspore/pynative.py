"""What PyNative mode keeps and records between operators."""

import contextlib
from collections.abc import Iterator

from mindspore.ops.composite.base import _pynative_executor


def forget_failed_calls() -> None:
    """
    Clears what PyNative mode keeps of calls that an exception ended.

    PyNative mode would go on casting all that follows to the dtype of the cell that the exception came through
    (`to_float`, or a level of amp), even what is assigned to a Parameter. It would also go on recording for the
    gradient, and graph mode may then fail to differentiate ("The node adjoint is null"). No public function ends
    either.

    It takes about 0.5 ms while operators run: call it once for many Parameters, and never in a running step.
    """
    _pynative_executor.clear_res()


def raise_what_failed() -> None:
    """Raises what an operator raised, if any did. PyNative mode otherwise raises it when a result is waited for."""
    _pynative_executor.sync()


@contextlib.contextmanager
def without_recording() -> Iterator[None]:
    """
    A context in which PyNative mode records nothing for a later `.backward()`. It would make other graphs of compiled
    code, which leave out some of what they write, and keep what they compute. No public function says so until 2.10.
    """
    enabled = _pynative_executor.enable_grad()
    _pynative_executor.set_enable_grad(False)
    try:
        yield
    finally:
        _pynative_executor.set_enable_grad(enabled)
