"""Loads checkpoints into a training cell, and refuses values that no training can go on with, whatever loads them."""

import numpy as np
from mindspore import ops

from ms_lossscale._arguments import check_bool, check_tensors_by_name, listed
from ms_lossscale._bounds import Bounded
from ms_lossscale._mindspore import write_in_place
from ms_lossscale._values import as_array
from ms_lossscale.sharding.load_parts import LoadedParts

# What 0.1 to 0.3 did not save, and is 0 between two cycles, and what they saved besides. What they copied for a cycle
# does not matter between two.
_ADDED_IN_0_4 = ("skip_reasons", "accumulation.steps", "alternation.steps", "_not_finite", "scale_is_set")
_REMOVED_IN_0_4 = ("clipping.scale", "accumulation.wrote_shared")
_OF_CYCLE = "forward_state."
# How the names of a cycle's calls and of its length end.
_COUNT, _LENGTH = "accumulation.micro_steps", "accumulation.steps"


def load(cell, parameters, strict):
    """Loads a checkpoint into a training cell in place, see :meth:`TrainingState.load_state_dict`."""
    cell._refuse_on_averages("'load_state_dict()'")
    own, loaded, owner = cell.parameters_dict(), cell._guard.loaded, f"{type(cell).__name__}.load_state_dict"
    check_tensors_by_name(f"For '{owner}', the argument 'parameters' must be a dict from names to Tensors", parameters)
    check_bool(owner, "strict", strict)
    parameters = loaded.updated(owner, loaded.parts.of(own, parameters))
    for name in own.keys() & parameters.keys():
        if tuple(parameters[name].shape) != tuple(own[name].shape):
            raise ValueError(
                f"For '{owner}', {name!r} must have the shape {tuple(own[name].shape)}, but got "
                f"{tuple(parameters[name].shape)}. Nothing was loaded."
            )
    pairs = (own, parameters), (parameters, own)
    missing, unexpected = ([name for name in one if name not in other] for one, other in pairs)
    loaded.check_values(parameters, owner, set(missing), " Nothing was loaded.")
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"For '{owner}', the names in 'parameters' must be those of the cell, but {_listed(missing)} missing and "
            f"{_listed(unexpected)} unexpected. Construct the cell with the same arguments as the one that was saved, "
            f"or pass strict=False to load what fits. Nothing was loaded."
        )
    write_in_place([(parameter, parameters[name]) for name, parameter in own.items() if name in parameters])
    loaded.begin_averages(set(missing))
    cell._after_loading()
    return missing, unexpected


def _listed(names):
    return f"{listed(names, 5) or 'none'} {'are' if len(names) > 1 else 'is'}"


class LoadedState:
    """
    Checks what is loaded into a training cell. A scale whose reciprocal is subnormal makes all gradients zero without a
    word, a cycle that was begun with other settings would make an update that is wrong by the ratio of the two, and one
    without the copies from its beginning could not be undone.

    Attributes:
        parts (LoadedParts): The parts of a checkpoint for this rank.
        watched (list[Parameter]): What shows, if it gets other memory, that MindSpore's own functions loaded something.
        rest (list[Parameter]): What should then have been loaded, too.
    """

    def __init__(self, cell, optimizers):
        self._owner, self._transactions = type(cell).__name__, [step.transaction for step in cell.steps]
        self.parts = LoadedParts(self._owner, optimizers)
        bounded = (each for _, each in cell.cells_and_names() if isinstance(each, Bounded))
        self._bounds = [its for each in bounded for its in each.bounds()]
        self._counts, self._steps = cell._cycle_counts(), cell._settings[0].gradient_accumulation_steps
        cycles = [its.cycle for its in self._transactions if its.cycle is not None]
        is_manual = any(its.is_weighted is not None for its in cycles)
        self._weighted = None if is_manual else any(its.weights is not None for its in cycles)
        self._averages = [pair for its in self._transactions for each in its.averages for pair in each.pairs()]
        self._copies = [
            (its.cycle.count, list(its.forward_state.copies)) for its in self._transactions if its.has_copies
        ]
        self.watched = [*(its.parameter for its in self._bounds), *self.parts.layouts]
        self.rest = [*(average for _, average in self._averages), *(each for _, its in self._copies for each in its)]

    def check(self, own, loaded, loaded_rest):
        """Checks what MindSpore's own functions have loaded, given `own` and the ids of what has other memory."""
        self.parts.check()
        missing = {its.name for its in self.rest if id(its) not in loaded_rest}
        self.check_values(own, self._owner, missing & self._copies_of_loaded_cycles(loaded))
        if any(id(its.counters.applied_steps) in loaded for its in self._transactions):
            self.begin_averages(missing)

    def _copies_of_loaded_cycles(self, loaded):
        return {each.name for count, copies in self._copies if id(count.value) in loaded for each in copies}

    def check_values(self, parameters, owner, missing, end=""):
        """Checks the scales and counts in `parameters`, a dict by name, given the names that are `missing` in it."""
        for its in self._bounds:
            if its.parameter.name in parameters:
                both = [each for each in (its.parameter, its.second) if each is not None]
                values, *second = (as_array(parameters.get(each.name, each)) for each in both)
                if not its.hold(values, *second):
                    got = " of ".join(str(each.tolist()) for each in (values, *second))
                    raise ValueError(
                        f"For '{owner}', {its.parameter.name!r} must be {its.must_be}, but got {got}: the checkpoint "
                        f"is damaged, or of another training.{end}"
                    )
        self._check_cycles(parameters, owner, end)
        for count, copies in self._copies:
            lacks = [each.name for each in copies if each.name in missing]
            if lacks and count.value.name in parameters and as_array(parameters[count.value.name]) > 0:
                raise ValueError(
                    f"For '{owner}', {count.value.name!r} is within an accumulation cycle, but {listed(lacks, 3)} "
                    f"is missing, by which the cycle could be undone. Load a checkpoint from between two cycles.{end}"
                )

    def _check_cycles(self, parameters, owner, end):
        """Checks that a cycle that has begun goes on as it began."""
        lengths = {count.value.name: count.length.name for count in self._counts}
        for name, value in parameters.items():
            if not (name in lengths or name.endswith(_COUNT)) or not np.all(as_array(value) > 0):
                continue
            length = lengths.get(name, f"{name[: -len(_COUNT)]}{_LENGTH}")
            length = int(as_array(parameters[length])) if length in parameters else "more than 1"
            if length != self._steps:
                raise ValueError(
                    f"For '{owner}', the argument 'gradient_accumulation_steps' must be {length}, but got "
                    f"{self._steps}: {name!r} is {as_array(value)}, so that this was saved within an accumulation "
                    f"cycle that was begun with {length}, and holds gradients divided by that. Go on with it to the "
                    f"end of the cycle, or to a flush(), and save then: between two cycles a checkpoint loads with "
                    f"any number.{end}"
                )
            sums = [each for each in parameters if each.endswith("accumulation.sum_of_weights")]
            was_weighted = bool(sums) and all(
                as_array(its).all() for each, its in parameters.items() if each.endswith("accumulation.is_weighted")
            )
            if self._weighted not in (None, was_weighted):
                raise ValueError(
                    f"For '{owner}', the argument 'weighted' must be {was_weighted}, but got {self._weighted}: "
                    f"{name!r} is {as_array(value)}, so that this was saved within an accumulation cycle that was "
                    f"begun so. Go on with it to the end of the cycle, or to a flush(), and save then.{end}"
                )

    def begin_averages(self, missing):
        """Begins the averages whose names are `missing` in what was loaded with the weights that it holds."""
        write_in_place([(average, weight) for weight, average in self._averages if average.name in missing])

    def updated(self, owner, parameters):
        """Returns a checkpoint with what versions 0.1 to 0.3 did not save."""
        parameters = dict(parameters)
        for name in [name for name in parameters if name.endswith(_REMOVED_IN_0_4)]:
            removed, root = parameters.pop(name), f"{name[: -len('scale')]}root"
            if root in parameters:  # The norm was that of the scaled gradients.
                parameters[root] = parameters[root] / removed
        # A diagnosis, not a state: those of other weights are not loaded.
        for its in (each.counters.overflowed for each in self._transactions):
            if its.name in parameters and parameters[its.name].shape != its.shape:
                parameters[its.name] = its
        counters = [each.counters for each in self._transactions]
        if not any(
            its.skipped_steps.name in parameters and its.skip_reasons.name not in parameters for its in counters
        ):
            return parameters
        for name in (count.value.name for count in self._counts):
            if name in parameters and as_array(parameters[name]) != 0:
                raise ValueError(
                    f"For '{owner}', {name!r} is {as_array(parameters[name])}: version 0.1 to 0.3 saved 'parameters' "
                    f"within an accumulation cycle, which this one can't go on with. Load a checkpoint from between "
                    f"two cycles. Nothing was loaded."
                )
        own = {its.name: its for each in self._transactions for its in each.get_parameters()}
        own.update((count.length.name, count.length) for count in self._counts)
        for name, its in own.items():
            if name not in parameters and (name.endswith(_ADDED_IN_0_4) or _OF_CYCLE in name):
                parameters[name] = its if _OF_CYCLE in name else ops.zeros_like(its)
        return {name: its for name, its in parameters.items() if name in own or _OF_CYCLE not in name}
