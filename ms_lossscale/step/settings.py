"""The settings of a step: what the training cells and ManualStep are given besides networks, optimizers and scales."""

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Optional, Union

from mindspore import Parameter, nn

from ms_lossscale._arguments import (
    AfterUpdate,
    OneOrEach,
    check_between,
    check_bool,
    check_int_from,
    check_number,
    must_be,
    one_each,
)
from ms_lossscale._mindspore.graphs import MethodCell
from ms_lossscale.function_network import check_can_be_called
from ms_lossscale.overflow_detector import OverflowDetector, default_overflow_detector
from ms_lossscale.skip_condition import SkipCondition


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    The checked settings of one step, which are compared across ranks. Those in the first group are tuples with an entry
    for each network. The defaults are those of a step of one network.
    """

    has_aux: tuple[bool, ...] = (False,)
    weighted: tuple[bool, ...] = (False,)
    clip_norm: tuple[Optional[float], ...] = (None,)
    clip_value: tuple[Optional[float], ...] = (None,)
    ema_decay: tuple[Optional[float], ...] = (None,)
    gradient_transforms: tuple[tuple[nn.Cell, ...], ...] = ((),)

    gradient_accumulation_steps: int = 1
    forward_state: tuple[Parameter, ...] = ()
    after_update: Optional[nn.Cell] = None
    overflow_detector: Optional[OverflowDetector] = None
    max_retries: int = 0
    skip_conditions: tuple[SkipCondition, ...] = ()
    gradients_reduced: Union[bool, str] = False
    drop_overflowed_calls: bool = False

    def ask_for_nothing(self) -> bool:
        """Returns whether, in a step of one network that is not checked, there is nothing to do but to update."""
        # These matter where steps are skipped, and between ranks.
        rest = dataclasses.replace(self, forward_state=(), overflow_detector=None, gradients_reduced=False)
        return rest == Settings()

    def of_network(self, number: int) -> "Settings":
        """Returns the settings of a step that trains this network alone."""
        return dataclasses.replace(
            self,
            has_aux=(self.has_aux[number],),
            weighted=(self.weighted[number],),
            clip_norm=(self.clip_norm[number],),
            clip_value=(self.clip_value[number],),
            ema_decay=(self.ema_decay[number],),
            gradient_transforms=(self.gradient_transforms[number],),
        )


def settings_among(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns those of a constructor's arguments, given as its `locals()`, that are settings."""
    return {field.name: arguments[field.name] for field in dataclasses.fields(Settings) if field.name in arguments}


def check_settings(
    owner: str,
    networks: int,
    *,
    gradient_accumulation_steps: int,
    clip_norm: OneOrEach[Optional[float]],
    clip_value: OneOrEach[Optional[float]],
    ema_decay: OneOrEach[Optional[float]],
    forward_state: Sequence[Union[Parameter, nn.Cell]],
    gradient_transforms: Sequence[Any],
    overflow_detector: Optional[OverflowDetector],
    gradients_reduced: Union[bool, str],
    drop_overflowed_calls: bool = False,
    after_update: Optional[AfterUpdate] = None,
    skip_conditions: Sequence[Any] = (),
    has_aux: OneOrEach[bool] = False,
    max_retries: int = 0,
    weighted: OneOrEach[bool] = False,
) -> Settings:
    """Checks the keywords of a constructor, for a step of so many networks. Raises for the first that is wrong."""

    def of_each(check, name, value):
        return tuple(check(owner, name, entry) for entry in one_each(owner, name, value, networks))

    settings = Settings(
        gradient_accumulation_steps=check_int_from(
            owner, "gradient_accumulation_steps", gradient_accumulation_steps, 1
        ),
        clip_norm=of_each(_check_bound, "clip_norm", clip_norm),
        clip_value=of_each(_check_bound, "clip_value", clip_value),
        ema_decay=of_each(_check_decay, "ema_decay", ema_decay),
        has_aux=of_each(check_bool, "has_aux", has_aux),
        forward_state=_check_forward_state(owner, forward_state),
        gradient_transforms=tuple(
            _check_transforms(owner, transforms)
            for transforms in _list_of_each(owner, "gradient_transforms", gradient_transforms, networks)
        ),
        after_update=_check_after_update(owner, after_update),
        overflow_detector=_check_detector(owner, overflow_detector),
        max_retries=check_int_from(owner, "max_retries", max_retries, 0),
        weighted=of_each(check_bool, "weighted", weighted),
        skip_conditions=_check_conditions(owner, skip_conditions),
        gradients_reduced=_check_reduced(owner, gradients_reduced),
        drop_overflowed_calls=check_bool(owner, "drop_overflowed_calls", drop_overflowed_calls),
    )
    if settings.drop_overflowed_calls and settings.gradient_accumulation_steps == 1:
        raise ValueError(
            f"For '{owner}', the argument 'drop_overflowed_calls' must be False without an accumulation cycle, since "
            f"each call is then a step, which is skipped if it overflowed, but got True. Set "
            f"gradient_accumulation_steps to 2 or more."
        )
    for norm, value in zip(settings.clip_norm, settings.clip_value):
        if norm is not None and value is not None:
            raise ValueError(
                f"For '{owner}', a network's gradients are clipped by 'clip_norm' or by 'clip_value', but got both: "
                f"{norm!r} and {value!r}. Set one of them to None."
            )
    return settings


def check_settings_of_steps(
    owner: str,
    networks: int,
    *,
    after_update: OneOrEach[Optional[AfterUpdate]],
    skip_conditions: Sequence[Any],
    **of_networks: Any,
) -> list[Settings]:
    """
    Checks the keywords for networks of which each makes a step: it may have an `after_update` and conditions of its
    own. Returns the settings of each step. Conditions that are not in lists are copied for each.
    """
    settings = check_settings(owner, networks, **of_networks)
    updates = one_each(owner, "after_update", after_update, networks)
    conditions = _list_of_each(owner, "skip_conditions", skip_conditions, networks)
    if not _is_list_of_lists(skip_conditions):
        conditions = [copy.deepcopy(skip_conditions) if i else skip_conditions for i in range(networks)]
    return [
        dataclasses.replace(
            settings.of_network(i),
            after_update=_check_after_update(owner, updates[i]),
            skip_conditions=_check_conditions(owner, conditions[i]),
        )
        for i in range(networks)
    ]


def _check_bound(owner, name, value):
    if value is None:
        return None
    if not check_number(owner, name, value) > 0:
        raise ValueError(f"For '{owner}', the argument '{name}' must be a number > 0, but got {value!r}.")
    return float(value)


def _check_decay(owner, name, value):
    return None if value is None else check_between(owner, name, value, 0.0, 1.0)


def _check_list(owner, name, values, kind, kind_name):
    """Raises unless `values` is a list or tuple of that kind. Returns it as a tuple."""
    if not isinstance(values, (list, tuple)):
        cure = f"Pass a single one as [{kind_name.lower()}]."
        raise TypeError(must_be(owner, name, f"a list or tuple of {kind_name}s", values, cure))
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise TypeError(must_be(owner, f"{name}[{i}]", f"a {kind_name}", value))
    return tuple(values)


def _is_list_of_lists(values):
    return isinstance(values, (list, tuple)) and any(isinstance(value, (list, tuple)) for value in values)


def _list_of_each(owner, name, values, networks):
    """Returns the list of each network: of a list of lists its own, else the one for all."""
    return one_each(owner, name, values, networks) if _is_list_of_lists(values) else [values] * networks


def _check_has_construct(owner, name, cell, inputs, signature):
    """Raises unless a Cell has a `construct` of its own that takes so many inputs."""
    if type(cell).construct in (nn.Cell.construct, SkipCondition.construct, OverflowDetector.construct):
        raise TypeError(
            f"For '{owner}', the argument '{name}', a {type(cell).__name__}, must define 'construct({signature})', "
            f"see docs/own_cells.md."
        )
    check_can_be_called(owner, name, cell, inputs, f"It must define construct({signature}), see docs/own_cells.md.")


def _check_transforms(owner, transforms):
    transforms = _check_list(owner, "gradient_transforms", transforms, nn.Cell, "Cell")
    for i, transform in enumerate(transforms):
        _check_has_construct(owner, f"gradient_transforms[{i}]", transform, 1, "self, grads")
    return transforms


def _check_conditions(owner, conditions):
    """Raises unless these are different SkipConditions that can be called. Returns them as a tuple."""
    conditions = _check_list(owner, "skip_conditions", conditions, SkipCondition, "SkipCondition")
    for i, condition in enumerate(conditions):
        name = f"skip_conditions[{i}]"
        _check_has_construct(owner, name, condition, 2, "self, loss, norm")
        check_can_be_called(owner, f"{name}.observe", condition.observe, 2, "It is called with the loss and the norm.")
    if len(set(map(id, conditions))) < len(conditions):
        raise ValueError(f"For '{owner}', the argument 'skip_conditions' must not hold the same condition twice.")
    return conditions


def _check_detector(owner, detector):
    detector = default_overflow_detector() if detector is None else detector
    if not isinstance(detector, OverflowDetector):
        raise TypeError(must_be(owner, "overflow_detector", "an OverflowDetector", detector))
    _check_has_construct(owner, "overflow_detector", detector, 1, "self, grads")
    return detector


def _check_after_update(owner, value):
    """Raises unless this is a Cell without inputs, a method of one, or None. Returns it as a Cell."""
    if value is None:
        return None
    if not isinstance(value, nn.Cell) and not isinstance(getattr(value, "__self__", None), nn.Cell):
        raise TypeError(must_be(owner, "after_update", "a Cell, or a method of one", value))
    if isinstance(value, nn.Cell):
        _check_has_construct(owner, "after_update", value, 0, "self")
        return value
    check_can_be_called(owner, "after_update", value, 0, "Pass a Cell without inputs, or a method such as ema.update.")
    return MethodCell(value)


def _check_reduced(owner, value):
    if not isinstance(value, (bool, str)) or value == "":
        raise TypeError(must_be(owner, "gradients_reduced", "True, False or the name of a communication group", value))
    return value


def _check_forward_state(owner, values):
    values = _check_list(owner, "forward_state", values, (Parameter, nn.Cell), "Parameter or Cell")
    parameters = [value.get_parameters() if isinstance(value, nn.Cell) else [value] for value in values]
    return tuple(dict.fromkeys(itertools.chain(*parameters)))
