"""Keywords under the names that they have elsewhere: the error says what they are called here."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from mindspore import nn

# In MindSpore's training cells, its toolkits and PyTorch's, and what a training cell of this package calls it.
_HERE = {
    "scale_sense": "loss_scale",
    "sens": "loss_scale",
    "loss_scaler": "loss_scale",
    "scaler": "loss_scale",
    "scale_update_cell": "loss_scale",
    "loss_scale_manager": "loss_scale",
    "accumulation_steps": "gradient_accumulation_steps",
    "accumulate_steps": "gradient_accumulation_steps",
    "accumulate_step": "gradient_accumulation_steps",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "max_accumulation_step": "gradient_accumulation_steps",
    "max_grad_norm": "clip_norm",
    "gradient_clip_val": "clip_norm",
    "clip_grad": "clip_norm",
    "ema": "ema_decay",
    "retries": "max_retries",
}


class ChecksKeywords(nn.Cell):
    """A Cell whose class tells what its user meant by a keyword that its constructor does not take."""

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters.values()
        # A subclass that takes any keyword passes on what it does not know itself.
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            check_keywords(cls.__name__, keywords, [each.name for each in parameters][1:])
        return super().__new__(cls, *args, **keywords)


def check_keywords(
    owner: str, keywords: Iterable[str], known: Iterable[str], error: type[Exception] = TypeError, **others: str
) -> None:
    """
    Raises an error for a keyword that is not `known`, with the one that was meant if there is a likely one. `others`
    has names of this owner for some that a training cell has.
    """
    known = list(known)
    for name in keywords:
        if name in known:
            continue
        meant = others.get(_HERE.get(name, name), _HERE.get(name, name))
        close = [meant] if meant in known else difflib.get_close_matches(name, known, 1)
        if close:
            raise error(f"For '{owner}', there is no argument '{name}'. Did you mean '{close[0]}'?")
