"""
What the steps of several networks write in an accumulation cycle, if they step one after the other. No network can undo
that alone: a skipped cycle of one would also undo what the others' forwards wrote.
"""

import collections

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale._gradients import of_any_network
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore import only_if
from ms_lossscale.forward_state.reachable import Reach
from ms_lossscale.step.forward_state import CallForwardState, CycleForwardState, became_not_finite
from ms_lossscale.step.optimizers import network_prefix


class SharingForwardState(CycleForwardState):
    """
    Holds what the step of one network may write, of which other networks' steps may write the `shared` part, too.

    A skipped cycle restores the rest. Of the shared part, it undoes what gradient transforms and an overflow detector
    wrote, and at once each call that left any of it not finite. What remains is for :class:`SharedState`.
    """

    def share(self, shared, prefix, network):
        """Takes what is shared, a dict from keys to Parameters, the same for all networks. `network` is its own."""
        keys = self.found.keys
        positions = [i for i, key in enumerate(keys) if key in shared]
        rest = [i for i, key in enumerate(keys) if key not in shared]
        self.shared, self.shared_copies = _part(self.written, positions), _part(self.copies, positions)
        self.rest, self.rest_copies = _part(self.written, rest), _part(self.copies, rest)
        self._shared_judged, self._rest_judged = self._judged_of(positions), self._judged_of(rest)
        # In what `save_shared` returns.
        self._shared_in_call = tuple(positions if self._restores_calls else range(len(positions)))
        # What the network can't reach, only transforms and detectors write.
        reached = {id(thing) for thing in Reach((network,)).things}
        holders = [key[0] if isinstance(key, tuple) else key for key in (keys[i] for i in positions)]
        self._not_of_forward = tuple(i for i, holder in enumerate(holders) if holder not in reached)
        self.not_of_forward = _part(self.shared, self._not_of_forward)
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

    def begin_cycle_where(self, is_first):
        """Copies the shared part if this is the first call of a cycle, before the first forward of any network."""
        copied = gradients.assign_where(is_first, self.shared_copies, self.shared)
        wrote = ops.logical_and(self.wrote[0], ops.logical_not(is_first))
        return copied, ops.assign(self.wrote[0], wrote)

    def save(self, inputs):
        saved = self.save_shared()
        inputs = ops.depend(inputs, saved)
        if len(self.rest) > 0:
            is_first = self.state.count.is_first()
            inputs = ops.depend(inputs, only_if(is_first, gradients.assign, self.rest_copies, self.rest))
        return inputs, saved

    def save_shared(self):
        return gradients.copy(self.written if self._restores_calls else self.shared)

    def overflowed(self, saved):
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
        before = gradients.items(saved, self._shared_in_call)
        if len(self.not_of_forward) > 0:
            its_before = gradients.items(before, self._not_of_forward)
            gradients.assign_where(of_any_network(overflow), self.not_of_forward, its_before)
        differs = gradients.each_differs(before, self.shared) + (gradients.never(self._no),)
        differs = ops.stack(gradients.items(differs, self._by_place))
        return ops.depend(overflow, ops.assign(self.wrote[0], ops.logical_or(self.wrote[0], differs)))


class SharedState(nn.Cell):
    """
    Ends a cycle for what several networks' steps may write: it goes back to the cycle's beginning if all networks that
    wrote it were skipped. `shared` is a dict from keys to Parameters, `forward_states` one from the numbers of networks
    to those that share it. If both are empty, it does nothing.

    Inputs:
        - **overflows** (Tensor) - Which networks were skipped, bool of shape :math:`(N,)`; not those that took no part.
    """

    def __init__(self, shared, forward_states):
        super().__init__(auto_prefix=False)
        self.forward_states = nn.CellList(list(forward_states.values()), auto_prefix=False)
        self._networks = tuple(forward_states)
        self.exists = len(forward_states) > 0
        # Hidden from MindSpore, as `written` of :class:`CallForwardState`.
        object.__setattr__(self, "_shared", ParameterTuple(shared.values()))
        self._copies = ParameterTuple(_copy_of(key, forward_states.values()) for key in shared)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def begin_call(self, inputs, count):
        """Returns the inputs, which wait for the copies that the first call of a cycle makes."""
        if self.exists:
            for forward_state in self.forward_states:
                inputs = ops.depend(inputs, forward_state.begin_cycle_where(count.is_first()))
        return inputs

    def end_call(self, overflows, count):
        """Ends a call, before `count` counts it. Returns `overflows`."""
        if self.exists:
            overflows = ops.depend(overflows, self._end_cycle(ops.logical_and(overflows, count.is_last())))
        return overflows

    def flush(self, overflows):
        """Ends a cycle that is flushed; an entry of `overflows` is None if the network takes no part."""
        if self.exists and any(overflow is not None for overflow in overflows):
            self(Tensor([overflow is not None and bool(overflow) for overflow in overflows]))

    def construct(self, overflows):
        return self._end_cycle(*self.use_parameters((overflows,)))

    def _end_cycle(self, overflows):
        overflows = ops.unstack(overflows)
        skipped_wrote, applied_wrote = (), ()
        for i, forward_state in enumerate(self.forward_states):
            wrote, overflow = forward_state.wrote[0], overflows[self._networks[i]]
            skipped_wrote += (ops.logical_and(wrote, overflow),)
            applied_wrote += (ops.logical_and(wrote, ops.logical_not(overflow)),)
        is_restored = ops.logical_and(_any(skipped_wrote), ops.logical_not(_any(applied_wrote)))
        return gradients.assign_each_where(ops.unstack(is_restored), self._shared, self._copies)


def _copy_of(key, forward_states):
    return next(
        copy for each in forward_states for its_key, copy in zip(each.found.keys, each.copies) if its_key == key
    )


def _any(flags):
    return ops.ReduceAny()(ops.stack(flags), 0)


def _part(parameters, positions):
    return ParameterTuple([parameters[i] for i in positions])


def share_state(steps, networks):
    """Makes the steps share what several of them may write in a cycle. Returns the SharedState."""
    _share_stand_ins([step.forward_state for step in steps])
    states = {i: step.forward_state for i, step in enumerate(steps)}
    states = {i: state for i, state in states.items() if isinstance(state, CycleForwardState)}
    counts = collections.Counter(key for state in states.values() for key in state.found.keys)
    shared = {}
    for state in states.values():
        shared.update((key, its) for key, its in zip(state.found.keys, state.written) if counts[key] > 1)
    states = {i: state for i, state in states.items() if shared.keys() & set(state.found.keys)}
    for i, state in states.items():
        state.__class__ = SharingForwardState
        state.share(shared, network_prefix(i), networks[i])
    return SharedState(shared, states)


def _share_stand_ins(states):
    """Makes the Parameters of all steps have names of their own, since graph mode compiles the steps into one graph."""
    found = [state.found for state in states if isinstance(state, CallForwardState)]
    parameters = {id(each): each.name for its in found for each in (*its.parameters, *its.unregistered)}
    counts = collections.Counter(parameters.values())
    taken, stand_ins = frozenset(name for name, count in counts.items() if count > 1), {}
    for i, state in enumerate(states):
        state.share_stand_ins(stand_ins, network_prefix(i), taken)
