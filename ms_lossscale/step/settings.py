"""The settings of a training cell: how they are checked, and described to be compared across ranks."""

import copy
import dataclasses
from typing import Optional, Union

from mindspore import Parameter, nn

from ms_lossscale._arguments import (
    check_between,
    check_bool,
    check_cell,
    check_int_from,
    check_number,
    check_positive_int,
    describe,
    one_each,
)
from ms_lossscale._signatures import check_can_be_called
from ms_lossscale.overflow_detector import OverflowDetector, default_overflow_detector
from ms_lossscale.skip_condition import SkipCondition


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    The settings of one step.

    Each field is compared across ranks. Clips, decays, gradient transforms, `has_aux` and `weighted` have one entry for
    each network of the step; the entries of `has_aux` are the same for one network that returns all losses.
    """

    gradient_accumulation_steps: int
    clip_norm: tuple
    clip_value: tuple
    ema_decay: tuple
    has_aux: tuple
    forward_state: tuple
    gradient_transforms: tuple
    after_update: Optional[nn.Cell]
    overflow_detector: OverflowDetector
    max_retries: int
    weighted: tuple
    skip_conditions: tuple
    gradients_reduced: Union[bool, str]

    def described(self):
        """Returns the settings by name, as JSON values."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


# What may be a list with one entry for each network of a step.
_OF_NETWORKS = ("has_aux", "clip_norm", "clip_value", "ema_decay", "weighted")


def check_settings(owner, networks, **keywords):
    """
    Checks the keywords that all training cells have, the fields of :class:`Settings`. What may be a list gets an entry
    for each of the `networks`; `gradient_transforms` has them. Returns the Settings of a step that all networks share.
    """
    given = Settings(**keywords)
    has_aux, clip_norm, clip_value, ema_decay, weighted = (
        one_each(owner, name, keywords[name], networks) for name in _OF_NETWORKS
    )
    for norm, value in zip(clip_norm, clip_value):
        if norm is not None and value is not None:
            raise ValueError(
                f"For '{owner}', a network's gradients are clipped by 'clip_norm' or by 'clip_value', but got both: "
                f"{norm!r} and {value!r}. Set one of them to None."
            )
    steps = given.gradient_accumulation_steps
    return Settings(
        gradient_accumulation_steps=check_positive_int(owner, "gradient_accumulation_steps", steps),
        clip_norm=tuple(_check_bound(owner, "clip_norm", bound) for bound in clip_norm),
        clip_value=tuple(_check_bound(owner, "clip_value", bound) for bound in clip_value),
        ema_decay=tuple(
            decay if decay is None else check_between(owner, "ema_decay", decay, 0.0, 1.0) for decay in ema_decay
        ),
        has_aux=tuple(check_bool(owner, "has_aux", its) for its in has_aux),
        forward_state=_check_forward_state(owner, given.forward_state),
        gradient_transforms=tuple(_check_gradient_transforms(owner, its) for its in given.gradient_transforms),
        after_update=_check_after_update(owner, given.after_update),
        overflow_detector=_check_overflow_detector(owner, given.overflow_detector),
        max_retries=check_int_from(owner, "max_retries", given.max_retries, 0),
        weighted=tuple(check_bool(owner, "weighted", its) for its in weighted),
        skip_conditions=_check_skip_conditions(owner, given.skip_conditions),
        gradients_reduced=_check_gradients_reduced(owner, given.gradients_reduced),
    )


def check_settings_of_each(owner, networks, **keywords):
    """
    Checks the same keywords for networks that decide alone. What may be a list gets an entry for each. Returns a list
    of their Settings.
    """
    one_network = {name: one_each(owner, name, keywords[name], networks) for name in _OF_NETWORKS}
    one_network["gradient_transforms"] = transforms_of_each(owner, keywords["gradient_transforms"], networks)
    one_step = {
        "after_update": one_each(owner, "after_update", keywords["after_update"], networks),
        "skip_conditions": _conditions_of_each(owner, keywords["skip_conditions"], networks),
    }
    settings = []
    for i in range(networks):
        its = {name: [values[i]] for name, values in one_network.items()}
        its.update((name, values[i]) for name, values in one_step.items())
        settings.append(check_settings(owner, 1, **{**keywords, **its}))
    return settings


class CallOfMethod(nn.Cell):
    """Makes a Cell of a Cell's method that takes no inputs."""

    def __init__(self, method):
        super().__init__(auto_prefix=False)
        self.of_cell = method.__self__
        self.method = method

    def construct(self):
        return self.method()


def _check_after_update(owner, after_update):
    if after_update is None:
        return None
    cure = "Pass a Cell without inputs, or a method such as ema.update of a Cell 'ema'."
    if not isinstance(after_update, nn.Cell) and not isinstance(getattr(after_update, "__self__", None), nn.Cell):
        raise TypeError(
            f"For '{owner}', the argument 'after_update' must be a Cell or a method of a Cell, but got "
            f"{describe(after_update)}. {cure}"
        )
    check_can_be_called(owner, "after_update", after_update, 0, cure)
    return after_update if isinstance(after_update, nn.Cell) else CallOfMethod(after_update)


def _check_bound(owner, name, value):
    if value is None:
        return None
    bound = check_number(owner, name, value)
    if not bound > 0:
        raise ValueError(f"For '{owner}', the argument '{name}' must be a number > 0, but got {bound!r}.")
    return bound


def _check_forward_state(owner, parameters):
    if not isinstance(parameters, (list, tuple)):
        raise TypeError(
            f"For '{owner}', the argument 'forward_state' must be a list or tuple of Parameters, but got "
            f"{describe(parameters)}."
        )
    for parameter in parameters:
        if not isinstance(parameter, Parameter):
            raise TypeError(
                f"For '{owner}', the argument 'forward_state' must hold Parameters only, but got {describe(parameter)}."
            )
    return tuple(parameters)


def _has_lists(value):
    """Returns whether it is a list or tuple that has lists or tuples, such as one for each network."""
    return isinstance(value, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in value)


def transforms_of_each(owner, gradient_transforms, networks):
    """Returns the transforms of each network, given one list for all networks or a list of lists."""
    if not _has_lists(gradient_transforms):
        return [gradient_transforms] * networks
    return one_each(owner, "gradient_transforms", gradient_transforms, networks)


def _check_gradient_transforms(owner, transforms):
    if not isinstance(transforms, (list, tuple)):
        raise TypeError(
            f"For '{owner}', the argument 'gradient_transforms' must be a list or tuple of Cells, or with several "
            f"networks a list of such lists, but got {describe(transforms)}. Pass a single Cell as [cell]."
        )
    cure = "Pass Cells that are called with a tuple of gradients and return one."
    for i, transform in enumerate(transforms):
        check_cell(owner, f"gradient_transforms[{i}]", transform, cure)
        check_can_be_called(owner, f"gradient_transforms[{i}]", transform, 1, cure)
    return tuple(transforms)


def _check_overflow_detector(owner, overflow_detector):
    if overflow_detector is None:
        return default_overflow_detector()
    if not isinstance(overflow_detector, OverflowDetector):
        raise TypeError(
            f"For '{owner}', the argument 'overflow_detector' must be an OverflowDetector or None, but got "
            f"'{type(overflow_detector).__name__}'. Derive your own from ms_lossscale.OverflowDetector."
        )
    name = type(overflow_detector).__name__
    its = "It gets a tuple of gradients and returns whether they overflowed, a bool Tensor of shape ()."
    if type(overflow_detector).construct is OverflowDetector.construct:
        raise TypeError(
            f"For '{owner}', an overflow detector must define 'construct(self, grads)', but '{name}' does not. {its} "
            f"Pass None for the detector of this device."
        )
    check_can_be_called(owner, "overflow_detector", overflow_detector, 1, its)
    return overflow_detector


def _conditions_of_each(owner, skip_conditions, networks):
    """
    Returns the conditions of each network that decides alone, given a list of lists, or one list whose conditions are
    copied.
    """
    if not _has_lists(skip_conditions):
        _check_skip_conditions(owner, skip_conditions)
        return [copy.deepcopy(skip_conditions) for _ in range(networks)]
    of_each = one_each(owner, "skip_conditions", skip_conditions, networks)
    _check_skip_conditions(owner, [condition for its in of_each for condition in its])
    return of_each


def _check_skip_conditions(owner, conditions):
    if not isinstance(conditions, (list, tuple)):
        raise TypeError(
            f"For '{owner}', the argument 'skip_conditions' must be a list or tuple of SkipConditions, but got "
            f"{describe(conditions)}. Pass a single one as [condition]."
        )
    cure = "It gets the loss and the norm of a step, and returns whether to skip it, a bool Tensor of shape ()."
    for i, condition in enumerate(conditions):
        name = f"skip_conditions[{i}]"
        if not isinstance(condition, SkipCondition):
            raise TypeError(
                f"For '{owner}', the argument '{name}' must be a SkipCondition, but got {describe(condition)}. Pass "
                f"NormSpike(max_norm=10.0), say, or derive your own from ms_lossscale.SkipCondition."
            )
        if type(condition).construct is SkipCondition.construct:
            raise TypeError(
                f"For '{owner}', a skip condition must define 'construct(self, loss, norm)', but "
                f"'{type(condition).__name__}' does not. {cure}"
            )
        check_can_be_called(owner, name, condition, 2, cure)
        if any(condition is other for other in conditions[:i]):
            raise ValueError(
                f"For '{owner}', the argument 'skip_conditions' must not hold the same condition twice, but "
                f"'{name}' is there before. Construct one for each place."
            )
    return tuple(conditions)


def _check_gradients_reduced(owner, value):
    if not isinstance(value, (bool, str)) or value == "":
        raise TypeError(
            f"For '{owner}', the argument 'gradients_reduced' must be True, False or the name of a communication "
            f"group, but got {describe(value)}."
        )
    return value


def _plain(value):
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Parameter):
        return value.name
    return type(value).__name__ if isinstance(value, nn.Cell) else value
