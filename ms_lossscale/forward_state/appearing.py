"""Notices state that appears after a training cell was constructed."""

import itertools
import weakref

from mindspore import Parameter, nn

from ms_lossscale._arguments import listed
from ms_lossscale._memory_in_use import known_parts
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.forward_state.reachable import reachable

# The calls before which all objects are walked through, ever more rarely: the second one, the fifth, ...
WALKS = frozenset(4**i + 1 for i in range(16))
# So many changes of what cells register are followed at once; in a network that makes more, only the walks find them.
_MOST_CHANGES = 20
_SHOWN = 3


class Appearing:
    """
    Finds state that has appeared. What a known cell registers is found before the next call; what is kept elsewhere,
    by walking through all objects, before the calls of `WALKS`.

    Args:
        owner (str): The name of the training cell, for the warning.
        networks (tuple[Cell]): The networks.
        find (Callable): Finds what their forward may write now; returns a `Found`.
        found (Found): What was found at construction.
        take_in (Union[Callable, None]): Is called with all that was found, so that a skipped step restores it. If
            None, it does not.
    """

    def __init__(self, owner, networks, find, found, take_in):
        self._owner, self._networks = owner, networks
        self._find, self._found, self._take_in = find, found, take_in
        self.calls, self._changes = itertools.count(1), 0
        self._known = {}
        self._remember(found.reached)
        # Not kept alive, should the user replace any of it.
        found.reached.clear()

    def look(self):
        """Takes in what has appeared, and warns."""
        if not self._remember(reachable(self._networks)):
            return
        found = self._find()
        new = found.beyond(self._found)
        if new.names:
            self._found = self._found.joined_with(new)
            if self._take_in is not None:
                self._take_in(self._found)
            self._warn(new.names)

    def _remember(self, things):
        """Remembers what there is. Returns whether there is a Parameter or buffer that was not there before."""
        cells = [thing for thing in things if isinstance(thing, nn.Cell)]
        self._changes += 1
        self.parts = known_parts(cells if self._changes <= _MOST_CHANGES else [])
        self.parts.remember()
        parameters = [(thing, "") for thing in things if isinstance(thing, Parameter)]
        buffers = [(cell, name) for cell in cells for name in cell._buffers]
        return len([each for each in (*parameters, *buffers) if self._is_new(*each)]) > 0

    def _is_new(self, owner, name):
        known = self._known.get((id(owner), name))
        if known is not None and known() is owner:
            return False
        self._known[id(owner), name] = weakref.ref(owner)
        return True

    def _warn(self, names):
        what_is_done = (
            "With gradient_accumulation_steps, a skipped step does not restore it"
            if self._take_in is None
            else "Skipped steps restore it from now on, but the step of a forward that makes such state can't"
        )
        warn_user(
            f"For '{self._owner}', the forward may write {listed(names, _SHOWN)}, which appeared after construction. "
            f"{what_is_done}. Make all state of the networks before you construct the training cell."
        )
