"""Arguments in other forms: keywords of other libraries and classes, which are answered, and of an earlier version."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from ms_lossscale._warn_user import warn_user

F = TypeVar("F", bound=Callable[..., Any])

_NAMES_ELSEWHERE = {
    "clip_norm": ("max_grad_norm", "max_norm", "grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip_val"),
    "gradient_accumulation_steps": ("accumulation_steps", "accumulate_grad_batches", "accumulate_step"),
    "ema_decay": ("ema",),
    "init_loss_scale": ("init_scale", "scale_value", "loss_scale"),
    "scale_window": ("growth_interval",),
    "scale_factor": ("growth_factor",),
    "loss_scale": ("scale_value", "scale_sense", "loss_scale_manager", "scaler"),
    "loss_scale_manager": ("loss_scale", "scale_sense", "scaler"),
}
# The keywords of each loss scale.
_SETTINGS: dict[str, Collection[str]] = {}


def answer_to(keyword: str, known: Collection[str]) -> str:
    """Returns what to write instead of a keyword where only these are known, empty if that is not clear."""
    names = [here for here, elsewhere in _NAMES_ELSEWHERE.items() if keyword in elsewhere]
    for name in names:
        if name in known:
            return f"Here it is '{name}'."
    for name in (keyword, *names):
        for kind, settings in _SETTINGS.items():
            if name in settings:
                return f"It is a setting of a loss scale: {kind}({name}=...)."
    return ""


def answers_keywords(**answers: str) -> Callable[[F], F]:
    """Lets a constructor answer keywords that it does not have; some by sentences of its own."""

    def decorate(init: F) -> F:
        known = inspect.signature(init).parameters
        kind = init.__qualname__.partition(".")[0]
        if kind.endswith("LossScale"):
            _SETTINGS[kind] = known

        @functools.wraps(init)
        def construct(self, *args, **keywords):
            for keyword in keywords.keys() - known.keys():
                answer = answers.get(keyword) or answer_to(keyword, known)
                if answer:
                    raise TypeError(f"For '{type(self).__name__}', there is no argument '{keyword}'. {answer}")
            init(self, *args, **keywords)

        return cast(F, construct)

    return decorate


def takes_positions(init: F) -> F:
    """Lets a constructor of keywords take them by position, too, as in version 0.5."""
    _, *names = inspect.signature(init).parameters

    @functools.wraps(init)
    def construct(self, *args, **keywords):
        by_name = dict(zip(names, args))
        if by_name:
            call = f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in by_name.items())})"
            what = "arguments by position are the form of version 0.5, and work for the last time"
            warn_user(f"For '{type(self).__name__}', {what}. Call {call}.", FutureWarning)
        return init(self, *args[len(names) :], **by_name, **keywords)

    return cast(F, construct)
