"""The side effects of a training forward, and how a skipped step undoes them."""

import dataclasses
from functools import partial
from typing import Callable, Optional

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import of_any_network
from ms_lossscale._mindspore import only_if
from ms_lossscale.forward_state.appearing import Appearing
from ms_lossscale.forward_state.find import Found, find_forward_state
from ms_lossscale.forward_state.reachable import Reach
from ms_lossscale.step.cycle_state import CycleState
from ms_lossscale.step.stage import ForwardState


class CallForwardState(ForwardState):
    """
    Holds what a training forward writes, if each call is a step. `is_judged` tells whether it shows an overflow if a
    Parameter is not finite, given its id: not if something else writes it, or if nothing is checked.
    """

    def __init__(self, found: Found, is_judged: Callable[[int], bool]) -> None:
        super().__init__()
        self.is_judged = is_judged
        self.parameters = ParameterTuple(found.parameters)
        self.hold(found)

    def hold(self, found: Found) -> None:
        """
        Holds what was found, or more than before. MindSpore then compiles anew, since there are more copies.
        """
        # Hidden from MindSpore, and so from checkpoints: loading would separate a Parameter from the buffer that it
        # stands for, and a Parameter outside the networks' cells need not have a name of its own.
        self.found = dataclasses.replace(found, taken=found.taken | self._taken)
        self.names, parameters = found.names, [*found.parameters, *found.unregistered, *found.buffers]
        keys, shared = dict(zip(self.names, found.keys)), self.found.shared()
        shared = {name: self._standing_in(keys[name], its) for name, its in shared.items()}
        written = [shared[name].parameter if name in shared else its for name, its in zip(self.names, parameters)]
        object.__setattr__(self, "written", ParameterTuple(written))
        # Integers are always finite.
        self._judged = tuple(
            i for i, its in enumerate(written) if its.dtype in mstype.float_type and self.is_judged(id(its))
        )
        unshared = [its for name, its in zip(self.names, written) if name not in shared]
        self.memory.hold(unshared, list(shared.values()))

    def _standing_in(self, key, shared):
        """Returns what stands for this in an earlier step, or else `shared`, with a name that no other step has."""
        if key not in self._stand_ins:
            shared.parameter.name = f"{self._prefix}{shared.name}"
        return self._stand_ins.setdefault(key, shared)

    def share_stand_ins(self, stand_ins: dict, prefix: str, taken: frozenset[str]) -> None:
        """Uses in one graph with other steps what stands for the same there, as Parameters of one name can't be."""
        super().share_stand_ins(stand_ins, prefix, taken)
        self.hold(self.found)

    def save(self, inputs):
        saved = gradients.copy(self.written)
        return ops.depend(inputs, saved), saved

    def overflowed(self, saved):
        return became_not_finite(saved, self.written, self._judged)

    def restore_call(self, saved):
        gradients.assign(self.written, saved)

    def restore_step(self, saved):
        gradients.assign(self.written, saved)


class CycleForwardState(CallForwardState):
    """
    Holds the same if the calls of a cycle are one step. The first call makes the copies, which are kept until the last
    call, also if training stops and resumes in between. `restores_calls`: single calls are undone, too.

    A skipped cycle restores all but what the steps of other networks may write, too. Of this `shared` part, it undoes
    what gradient transforms and an overflow detector wrote, and at once each call that left any of it not finite. What
    remains is for :class:`SharedState`.
    """

    def __init__(
        self, found: Found, is_judged: Callable[[int], bool], state: CycleState, prefix: str, restores_calls: bool
    ) -> None:
        super().__init__(found, is_judged)
        self.state = state
        self._restores_calls = restores_calls
        self.copies = ParameterTuple(
            Parameter(ops.deepcopy(parameter), name=f"{prefix}forward_state.{name}", requires_grad=False)
            for name, parameter in zip(self.names, self.written)
        )
        self.share({}, prefix, None)

    def share(self, shared: dict, prefix: str, network: Optional[nn.Cell]) -> None:
        """Takes what is shared, a dict from keys to Parameters, the same for all networks. `network` is its own."""
        keys = self.found.keys
        positions = [i for i, key in enumerate(keys) if key in shared]
        rest = [i for i, key in enumerate(keys) if key not in shared]
        # Hidden from MindSpore, as `written`.
        for name, its in (
            ("shared", [self.written[i] for i in positions]),
            ("rest", [self.written[i] for i in rest]),
            ("shared_copies", [self.copies[i] for i in positions]),
            ("rest_copies", [self.copies[i] for i in rest]),
        ):
            object.__setattr__(self, name, ParameterTuple(its))
        self._shared_judged, self._rest_judged = self._judged_of(positions), self._judged_of(rest)
        # In what `save_shared` returns.
        self._shared_in_call = tuple(positions if self._restores_calls else range(len(positions)))
        if not positions:
            return
        # What the network can't reach, only transforms and detectors write.
        reached = {id(thing) for thing in Reach((network,)).things}
        holders = [key[0] if isinstance(key, tuple) else key for key in (keys[i] for i in positions)]
        self._not_of_forward = tuple(i for i, holder in enumerate(holders) if holder not in reached)
        object.__setattr__(self, "not_of_forward", ParameterTuple(self.shared[i] for i in self._not_of_forward))
        # Whether a call of this cycle wrote it, for each key.
        wrote = Parameter(
            Tensor(np.ones(len(shared), bool)), name=f"{prefix}accumulation.wrote_shared", requires_grad=False
        )
        self.wrote = ParameterTuple([wrote])
        places = {key: place for place, key in enumerate(shared)}
        self._places = tuple(places[keys[i]] for i in positions)
        # The last position is that of a constant.
        self._by_place = tuple(self._places.index(place) if place in self._places else -1 for place in places.values())
        self._no = Tensor(0.0)

    def _judged_of(self, positions):
        return tuple(i for i, position in enumerate(positions) if position in self._judged)

    def of_one_call(self):
        return CallForwardState(self.found, self.is_judged)

    def begin_cycle_where(self, is_first):
        """Copies the shared part if this is the first call of a cycle, before the first forward of any network."""
        copied = gradients.assign_where(is_first, self.shared_copies, self.shared)
        wrote = prim.logical_and(self.wrote[0], prim.logical_not(is_first))
        return copied, prim.assign(self.wrote[0], wrote)

    def save(self, inputs):
        saved = self.save_shared()
        if len(saved) > 0:
            inputs = ops.depend(inputs, saved)
        if len(self.rest) > 0:
            is_first = self.state.count.is_first()
            inputs = ops.depend(inputs, only_if(is_first, gradients.assign, self.rest_copies, self.rest))
        return inputs, saved

    def save_shared(self):
        saved = self.written if self._restores_calls else self.shared
        return gradients.copy(saved) if len(saved) > 0 else ()

    def overflowed(self, saved):
        overflowed = ()
        if len(self.shared) > 0:
            before = gradients.items(saved, self._shared_in_call)
            overflowed = became_not_finite(before, self.shared, self._shared_judged)
            for became in overflowed:
                gradients.assign_where(became, self.shared, before)
        if len(self.rest) > 0:
            overflowed += became_not_finite(self.rest_copies, self.rest, self._rest_judged)
        return overflowed

    def restore_step(self, saved):
        if len(self.rest) > 0:
            gradients.assign(self.rest, self.rest_copies)

    def end_call(self, overflow, saved):
        if len(self.shared) == 0:
            return overflow
        before = gradients.items(saved, self._shared_in_call)
        if len(self.not_of_forward) > 0:
            its_before = gradients.items(before, self._not_of_forward)
            gradients.assign_where(of_any_network(overflow), self.not_of_forward, its_before)
        differs = gradients.each_differs(before, self.shared) + (gradients.never(self._no),)
        differs = prim.stack(gradients.items(differs, self._by_place))
        return ops.depend(overflow, prim.assign(self.wrote[0], prim.logical_or(self.wrote[0], differs)))


def became_not_finite(before, after, judged):
    """
    Returns whether any element of what is `judged`, by position, became infinite or NaN: a tuple of one bool tensor,
    empty if nothing is judged.
    """
    if not judged:
        return ()
    if len(judged) < len(after):
        before, after = gradients.items(before, judged), gradients.items(after, judged)
    became = prim.logical_not(gradients.has_finite_sum(after))
    # Only then does it matter whether single elements are finite, and were before: sums of large ones are not, nor are
    # the bounds that an observer begins with.
    if became:
        became = gradients.became_not_finite(before, after)
    return (became,)


def make_forward_state(
    owner, networks, declared, not_of_forward, undoes, checks, names_of_others, cycle_state, prefix, restores_calls
):
    """
    Returns what a step undoes: what is found in the forward of the networks, what is declared besides, and what is
    written, but not in the forward; nothing if the step never `undoes`. It shows overflows if the step `checks` for
    them. `names_of_others` are those of other Parameters of the step, `cycle_state` is None if each call is a step.
    """
    if not undoes:
        return ForwardState()
    find = partial(find_forward_state, owner, networks, (*declared, *not_of_forward), names_of_others)
    found, not_judged = find(), frozenset(map(id, not_of_forward)) - set(map(id, declared))

    def is_judged(parameter):
        return checks and parameter not in not_judged

    if not found.names:
        forward_state = ForwardState()
        forward_state.is_judged = is_judged
    elif cycle_state is None:
        forward_state = CallForwardState(found, is_judged)
    else:
        forward_state = CycleForwardState(found, is_judged, cycle_state, prefix, restores_calls)
    take_in = partial(_take_in, forward_state) if cycle_state is None else None
    forward_state.appearing = Appearing(owner, networks, find, found, take_in)
    return forward_state


def _take_in(forward_state, found):
    if not isinstance(forward_state, CallForwardState):
        # It is a part of many stages, which go on with the same object.
        forward_state.__class__ = CallForwardState
    forward_state.memory.put_back()
    forward_state.hold(found)
