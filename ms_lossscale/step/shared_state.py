"""
What the steps of several networks write in an accumulation cycle, if they step one after the other. No network can undo
that alone: a skipped cycle of one would also undo what the others' forwards wrote.
"""

import collections

from mindspore import ParameterTuple, Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale.step.forward_state import CallForwardState, CycleForwardState
from ms_lossscale.step.optimizers import network_prefix


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
            overflows = ops.depend(overflows, self._end_cycle(prim.logical_and(overflows, count.is_last())))
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
            skipped_wrote += (prim.logical_and(wrote, overflow),)
            applied_wrote += (prim.logical_and(wrote, prim.logical_not(overflow)),)
        is_restored = prim.logical_and(_any(skipped_wrote), prim.logical_not(_any(applied_wrote)))
        return gradients.assign_each_where(ops.unstack(is_restored), self._shared, self._copies)


def _copy_of(key, forward_states):
    return next(
        copy for each in forward_states for its_key, copy in zip(each.found.keys, each.copies) if its_key == key
    )


def _any(flags):
    return prim.reduce_any(prim.stack(flags), 0)


def share_state(steps, networks):
    """Makes the steps share what several of them may write in a cycle. Returns the SharedState."""
    _share_stand_ins([step.forward_state for step in steps])
    states = {i: step.forward_state for i, step in enumerate(steps)}
    states = {i: state for i, state in states.items() if isinstance(state, CycleForwardState)}
    counts = collections.Counter(key for state in states.values() for key in state.found.keys)
    shared = {}
    for state in states.values():
        shared.update((key, its) for key, its in zip(state.found.keys, state.written) if counts[key] > 1)
    for i, state in states.items():
        state.share(shared, network_prefix(i), networks[i])
    return SharedState(shared, {i: state for i, state in states.items() if len(state.shared) > 0})


def _share_stand_ins(states):
    """Makes the Parameters of all steps have names of their own, since graph mode compiles the steps into one graph."""
    found = [state.found for state in states if isinstance(state, CallForwardState)]
    parameters = {id(each): each.name for its in found for each in (*its.parameters, *its.unregistered)}
    counts = collections.Counter(parameters.values())
    taken, stand_ins = frozenset(name for name, count in counts.items() if count > 1), {}
    for i, state in enumerate(states):
        state.share_stand_ins(stand_ins, network_prefix(i), taken)
