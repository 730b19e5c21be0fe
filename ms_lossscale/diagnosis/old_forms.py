"""Calls of the diagnoses in the form of version 0.4. They work, with a warning."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from mindspore import Tensor

from ms_lossscale._output import warn_user

F = TypeVar("F", bound=Callable[..., Any])


def takes_parameters_second(diagnose: F) -> F:
    """Lets a function of `(network, batches, *, parameters=None)` take `(network, parameters, batches)`, too."""
    owner = diagnose.__name__

    @functools.wraps(diagnose)
    def call(*args, **keywords):
        is_old = len(args) == 3 or (len(args) == 2 and "batches" in keywords)
        if is_old:
            _warn(owner, "(network, parameters, batches)", "(network, batches, parameters=parameters)")
            keywords["parameters"] = args[1]
            args = (args[0], *args[2:])
        return diagnose(*args, **keywords)

    return cast(F, call)


def takes_clip(diagnose: F) -> F:
    """Lets a function of `clip_norm` take `clip`, too."""
    owner = diagnose.__name__

    @functools.wraps(diagnose)
    def call(*args, **keywords):
        if "clip" in keywords:
            _warn(owner, "(..., clip=norm)", "(..., clip_norm=norm)")
            keywords["clip_norm"] = keywords.pop("clip")
        return diagnose(*args, **keywords)

    return cast(F, call)


def takes_one_batch(diagnose: F) -> F:
    """Lets a function of `(network, batches)` take one batch, a Tensor or a tuple of them, also as `inputs`."""
    owner = diagnose.__name__

    @functools.wraps(diagnose)
    def call(*args, **keywords):
        if "inputs" in keywords and len(args) < 2:
            keywords["batches"] = keywords.pop("inputs")
        batches = args[1] if len(args) > 1 else keywords.pop("batches", None)
        if _is_one_batch(batches):
            _warn(owner, "(network, inputs)", "(network, [inputs])")
            batches = [batches]
        return diagnose(*args[:1], batches, *args[2:], **keywords)

    return cast(F, call)


def _is_one_batch(batches):
    if isinstance(batches, tuple):
        return any(isinstance(value, (Tensor, np.ndarray)) for value in batches)
    return isinstance(batches, (Tensor, np.ndarray))


def _warn(owner, old, new):
    warn_user(
        f"For '{owner}', {owner}{old} is the form of version 0.4, and works for the last time. Call {owner}{new}.",
        FutureWarning,
    )
