"""The side effects of a training forward, and how a skipped step undoes them."""

import dataclasses
from functools import partial

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._mindspore import only_if, write_in_place
from ms_lossscale.forward_state.appearing import Appearing
from ms_lossscale.forward_state.find import Found, find_forward_state
from ms_lossscale.step.accumulation import CycleState
from ms_lossscale.step.stage import ForwardState


class CallForwardState(ForwardState):
    """
    Holds what a training forward writes, if each call is a step. `not_judged` are the ids of Parameters that something
    else writes: if they are not finite, this does not show an overflow.
    """

    _not_judged: frozenset[int] = frozenset()

    def __init__(self, found: Found, not_judged: frozenset[int]) -> None:
        super().__init__()
        self._not_judged = not_judged
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
        self._judged = tuple(i for i, its in enumerate(written) if id(its) not in self._not_judged)
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
    """

    def __init__(self, found: Found, not_judged: frozenset[int], state: CycleState, prefix: str, restores_calls: bool):
        super().__init__(found, not_judged)
        self.state = state
        self._restores_calls = restores_calls
        self.copies = ParameterTuple(
            Parameter(_not_copied(parameter), name=f"{prefix}forward_state.{name}", requires_grad=False)
            for name, parameter in zip(self.names, self.written)
        )

    def of_one_call(self):
        return CallForwardState(self.found, self._not_judged)

    def save(self, inputs):
        inputs = ops.depend(inputs, only_if(self.state.count.is_first(), gradients.assign, self.copies, self.written))
        if not self._restores_calls:
            return inputs, ()
        saved = gradients.copy(self.written)
        return ops.depend(inputs, saved), saved

    def overflowed(self, saved):
        return became_not_finite(self.copies, self.written, self._judged)

    def restore_step(self, saved):
        gradients.assign(self.written, self.copies)


def _not_copied(parameter):
    """Returns what a copy holds before a cycle or a checkpoint gives it a value: an unlikely one."""
    if not _can_be_marked(parameter):
        return ops.deepcopy(parameter)
    values = parameter.asnumpy()
    return Tensor(np.frombuffer(b"Z" * values.nbytes, values.dtype).reshape(values.shape).copy())


def copy_what_is_missing(forward_state):
    """Makes the missing copies in a cycle that was loaded from a checkpoint of a version which copied less."""
    pairs = zip(forward_state.copies, forward_state.written)
    pairs = [(copy, its) for copy, its in pairs if _can_be_marked(copy) and set(copy.asnumpy().tobytes()) == {*b"Z"}]
    write_in_place(pairs)


def _can_be_marked(parameter):
    # NumPy knows no bfloat16, and a bool has no unlikely value.
    return parameter.dtype not in (mstype.bool_, mstype.bfloat16)


@ops.constexpr
def _positions_of_floats(kinds, judged):
    return tuple(i for i in judged if kinds[i][0] in mstype.float_type)


def became_not_finite(before, after, judged):
    """
    Returns whether any element of what is `judged`, by position, became infinite or NaN: a tuple of one bool tensor,
    empty if all are integers.
    """
    floats = _positions_of_floats(gradients.kinds(after), judged)
    if not floats:
        return ()
    before, after = gradients.items(before, floats), gradients.items(after, floats)
    became = ops.logical_not(gradients.finite(after))
    # Only then does it matter what was not finite before, such as the bounds that an observer begins with.
    if became:
        became = gradients.became_not_finite(before, after)
    return (became,)


def make_forward_state(
    owner, networks, declared, not_of_forward, undoes, names_of_others, cycle_state, prefix, restores_calls
):
    """
    Returns what a step undoes: what is found in the forward of the networks, what is declared besides, and what is
    written, but not in the forward; nothing if the step never `undoes`. `names_of_others` are those of other Parameters
    of the step, `cycle_state` is None if each call is a step.
    """
    if not undoes:
        return ForwardState()
    find = partial(find_forward_state, owner, networks, (*declared, *not_of_forward), names_of_others)
    found, not_judged = find(), frozenset(map(id, not_of_forward)) - set(map(id, declared))
    if not found.names:
        forward_state = ForwardState()
    elif cycle_state is None:
        forward_state = CallForwardState(found, not_judged)
    else:
        forward_state = CycleForwardState(found, not_judged, cycle_state, prefix, restores_calls)
    take_in = partial(_take_in, forward_state) if cycle_state is None else None
    forward_state.appearing = Appearing(owner, networks, find, found, take_in)
    return forward_state


def _take_in(forward_state, found):
    if not isinstance(forward_state, CallForwardState):
        # It is a part of many stages, which go on with the same object.
        forward_state.__class__ = CallForwardState
    forward_state.memory.put_back()
    forward_state.hold(found)
