"""PyNative mode: what it keeps and records between operators, and hooks and the like to look into a run in it."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Callable

from mindspore import nn
from mindspore.ops.composite.base import _pynative_executor, _TaylorOperation, _Vmap


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


def around_transforms(context: Callable[[], contextlib.AbstractContextManager]) -> contextlib.AbstractContextManager:
    """
    A context that enters `context()` whenever `vmap` (which `jacrev` and `jacfwd` use) or `jet` runs the function that
    it transforms. Both exist in compiled code only: with MS_JIT=0 in the environment, they call themselves without end.
    """

    def around(transform):
        def call(self, *args, **kwargs):
            def transformed(*inputs, **keywords):
                with context():
                    return transform(self, *args, **kwargs)(*inputs, **keywords)

            return transformed

        return call

    return replaced([(_Vmap, "__call__"), (_TaylorOperation, "__call__")], around)


@contextlib.contextmanager
def without_jit() -> Iterator[None]:
    """A context in which functions decorated with `mindspore.jit` run as they are, as cells do in PyNative mode."""
    with _ms_jit("0"), around_transforms(lambda: _ms_jit("1")):
        yield


@contextlib.contextmanager
def _ms_jit(value):
    before = os.environ.get("MS_JIT")
    os.environ["MS_JIT"] = value
    try:
        yield
    finally:
        del os.environ["MS_JIT"]
        if before is not None:
            os.environ["MS_JIT"] = before


def noticing_gradients(notice: Callable[[], None]) -> contextlib.AbstractContextManager:
    """
    A context that calls `notice` whenever PyNative mode has computed a gradient within a function that it is going to
    differentiate. Nothing public shows this.
    """

    def noticed(compute):
        def compute_and_notice(*args, **kwargs):
            grads = compute(*args, **kwargs)
            if _pynative_executor.requires_grad():
                notice()
            return grads

        return compute_and_notice

    # They compute every gradient in PyNative mode, whichever function asks for it. MindSpore 2.7 has both.
    executor = type(_pynative_executor)
    return replaced([(executor, name) for name in ("grad", "grad_aux") if hasattr(executor, name)], noticed)


@contextlib.contextmanager
def replaced(attributes, around):
    """A context in which what `around` makes of these attributes, an owner and a name each, takes their place."""
    before = [(owner, name, getattr(owner, name)) for owner, name in attributes]
    try:
        for owner, name, value in before:
            setattr(owner, name, around(value))
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def register_forward_hook(cell: nn.Cell, hook: Callable) -> Any:
    """
    Registers a hook also on a cell with a `bprop`. The cell's own method does not, though such a cell calls its hooks.
    """
    with replaced([(cell, "has_bprop")], lambda _: False):
        return cell.register_forward_hook(hook)
