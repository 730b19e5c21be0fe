"""The settings that all training cells and ManualStep have: one table says how each is checked."""

import copy
import dataclasses
import itertools

from mindspore import Parameter, nn

from ms_lossscale._arguments import check_between, check_bool, check_int_from, check_number, describe, one_each
from ms_lossscale._signatures import check_can_be_called
from ms_lossscale.overflow_detector import OverflowDetector, default_overflow_detector
from ms_lossscale.skip_condition import SkipCondition


class CallOfMethod(nn.Cell):
    """Makes a Cell of a Cell's method that takes no inputs."""

    def __init__(self, method):
        super().__init__(auto_prefix=False)
        self.of_cell, self.method = method.__self__, method

    def construct(self):
        return self.method()


def _bound(owner, name, value):
    if value is not None and not check_number(owner, name, value) > 0:
        raise ValueError(f"For '{owner}', the argument '{name}' must be a number > 0, but got {value!r}.")
    return value if value is None else float(value)


def _decay(owner, name, value):
    return value if value is None else check_between(owner, name, value, 0.0, 1.0)


def _list_of(kind, what):
    def check(owner, name, values):
        if not isinstance(values, (list, tuple)):
            raise TypeError(
                f"For '{owner}', the argument '{name}' must be a list or tuple of {what}s, but got "
                f"{describe(values)}. Pass a single one as [{what.lower()}]."
            )
        for i, each in enumerate(values):
            if not isinstance(each, kind):
                raise TypeError(
                    f"For '{owner}', the argument '{name}[{i}]' must be a {what}, but got {describe(each)}."
                )
        return tuple(values)

    return check


def _called(owner, name, cell, inputs, signature):
    """Raises unless a Cell has a `construct` of its own that takes so many inputs."""
    if type(cell).construct in (nn.Cell.construct, SkipCondition.construct, OverflowDetector.construct):
        raise TypeError(
            f"For '{owner}', the argument '{name}', a {type(cell).__name__}, must define 'construct({signature})', "
            f"see docs/own_cells.md."
        )
    check_can_be_called(owner, name, cell, inputs, f"It must define construct({signature}), see docs/own_cells.md.")


def _transforms(owner, name, transforms):
    transforms = _list_of(nn.Cell, "Cell")(owner, name, transforms)
    for i, each in enumerate(transforms):
        _called(owner, f"{name}[{i}]", each, 1, "self, grads")
    return transforms


def _conditions(owner, name, conditions):
    conditions = _list_of(SkipCondition, "SkipCondition")(owner, name, conditions)
    for i, each in enumerate(conditions):
        _called(owner, f"{name}[{i}]", each, 2, "self, loss, norm")
        check_can_be_called(owner, f"{name}[{i}].observe", each.observe, 2, "It is called with the loss and the norm.")
    if len(set(map(id, conditions))) < len(conditions):
        raise ValueError(f"For '{owner}', the argument '{name}' must not hold the same condition twice.")
    return conditions


def _detector(owner, name, detector):
    detector = default_overflow_detector() if detector is None else detector
    if not isinstance(detector, OverflowDetector):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be an OverflowDetector, but got {describe(detector)}."
        )
    _called(owner, name, detector, 1, "self, grads")
    return detector


def _after_update(owner, name, value):
    if value is None:
        return None
    if not isinstance(value, nn.Cell) and not isinstance(getattr(value, "__self__", None), nn.Cell):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a Cell, or a method of one, but got {describe(value)}."
        )
    if isinstance(value, nn.Cell):
        _called(owner, name, value, 0, "self")
        return value
    check_can_be_called(owner, name, value, 0, "Pass a Cell without inputs, or a method such as ema.update.")
    return CallOfMethod(value)


def _reduced(owner, name, value):
    if not isinstance(value, (bool, str)) or value == "":
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be True, False or the name of a communication "
            f"group, but got {describe(value)}."
        )
    return value


def _forward_state(owner, name, values):
    values = _list_of((Parameter, nn.Cell), "Parameter or Cell")(owner, name, values)
    held = [each.get_parameters() if isinstance(each, nn.Cell) else [each] for each in values]
    return tuple(dict.fromkeys(itertools.chain(*held)))


def _count(low):
    return lambda owner, name, value: check_int_from(owner, name, value, low)


# The default and the check of each. What may differ between the networks of a step, and between those of an
# AlternatingTrainOneStepCell, may be a list.
_SETTINGS = {
    "gradient_accumulation_steps": (1, _count(1)),
    "clip_norm": (None, _bound),
    "clip_value": (None, _bound),
    "ema_decay": (None, _decay),
    "has_aux": (False, check_bool),
    "forward_state": ((), _forward_state),
    "gradient_transforms": ((), _transforms),
    "after_update": (None, _after_update),
    "overflow_detector": (None, _detector),
    "max_retries": (0, _count(0)),
    "weighted": (False, check_bool),
    "skip_conditions": ((), _conditions),
    "gradients_reduced": (False, _reduced),
}
_OF_NETWORKS = ("has_aux", "clip_norm", "clip_value", "ema_decay", "weighted", "gradient_transforms")
_OF_STEPS = (*_OF_NETWORKS, "after_update", "skip_conditions")
_LISTS = ("gradient_transforms", "skip_conditions")

# A step's settings, which are compared across ranks. Those of `_OF_NETWORKS` are tuples with one for each network.
Settings = dataclasses.make_dataclass("Settings", list(_SETTINGS), frozen=True)


def given(arguments):
    """Returns the settings among the arguments of a constructor, a dict by name."""
    return {name: its for name, its in arguments.items() if name in _SETTINGS}


def _of_each(owner, name, value, count):
    """Returns the value of each network: of what is a list itself, one for each is a list of lists."""
    if name in _LISTS:
        _, check = _SETTINGS[name]
        if not isinstance(value, (list, tuple)):
            check(owner, name, value)
        if not any(isinstance(each, (list, tuple)) for each in value):
            return [value] * count
    return one_each(owner, name, value, count)


def check_settings(owner, networks, **keywords):
    """Checks the settings of a step of so many networks."""
    its = {}
    for name, (default, check) in _SETTINGS.items():
        value = keywords.get(name, default)
        if name in _OF_NETWORKS:
            its[name] = tuple(check(owner, name, each) for each in _of_each(owner, name, value, networks))
        else:
            its[name] = check(owner, name, value)
    for norm, value in zip(its["clip_norm"], its["clip_value"]):
        if norm is not None and value is not None:
            raise ValueError(
                f"For '{owner}', a network's gradients are clipped by 'clip_norm' or by 'clip_value', but got both: "
                f"{norm!r} and {value!r}. Set one of them to None."
            )
    return Settings(**its)


def check_settings_of_each(owner, networks, **keywords):
    """Checks the settings of networks that decide alone. Conditions that are not in lists are copied for each."""
    settings = []
    each = {name: _of_each(owner, name, its, networks) for name, its in keywords.items() if name in _OF_STEPS}
    for i in range(networks):
        its = {
            name: copy.deepcopy(values[i]) if name == "skip_conditions" and i else values[i]
            for name, values in each.items()
        }
        its = {name: [value] if name in _OF_NETWORKS else value for name, value in its.items()}
        settings.append(check_settings(owner, 1, **{**keywords, **its}))
    return settings
