"""Finds all objects that can be reached from networks. Their forwards can write to nothing else."""

import collections
import opcode
import sys
import types

from mindspore import Tensor, nn
from mindspore.experimental import optim as experimental_optim

from ms_lossscale.forward_state.budget import Budget, OutOfBudget
from ms_lossscale.forward_state.ownership import is_disguised, is_users, is_users_namespace
from ms_lossscale.forward_state.referents import may_lead_on, referents

OPTIMIZERS = (nn.Optimizer, experimental_optim.Optimizer)
# So many objects are looked at, which takes a second or so, and more for each cell: ten times what cells need. What is
# in containers with more than _MANY comes last.
_LOOKS, _LOOKS_FOR_A_CELL, _MANY = 100_000, 100, 1000
_IMPORT_NAME = opcode.opmap["IMPORT_NAME"]


class Reach:
    """
    What can be reached through attributes, containers, cells, helper objects, closures and defaults, and, in code of
    the user's, through classes, and through the names of globals and modules that functions use.

    Args:
        things (list): What it begins with.
        ends (tuple): Classes of Cells that are found, but not gone through.

    Attributes:
        things (list): All objects found whose class can be told.
        is_complete (bool): Whether there are no more.
    """

    def __init__(self, things, ends=()):
        self._ends = ends
        self._found, self._waiting, self._last = {}, collections.deque(), collections.deque()
        # The names that are used in functions, in their order, and the modules in which they may be looked up.
        self._names, self._modules = {}, []
        self._waiting.extend(filter(may_lead_on, things))
        budget = Budget(_LOOKS)
        try:
            while self._waiting or self._last:
                thing = (self._waiting or self._last).popleft()
                if id(thing) not in self._found:
                    budget.spend(-_LOOKS_FOR_A_CELL if issubclass(type(thing), nn.Cell) else 1)
                    self._look_at(thing)
            self.is_complete = True
        except OutOfBudget:
            self.is_complete = False
        self.things = [thing for thing in self._found.values() if not is_disguised(type(thing))]

    def _look_at(self, thing):
        self._found[id(thing)] = thing
        if issubclass(type(thing), self._ends):
            return
        self._add(referents(thing))
        self._add_by_name(thing)

    def _add(self, things):
        things = list(filter(may_lead_on, things))
        (self._last if len(things) > _MANY else self._waiting).extend(things)

    def _add_by_name(self, thing):
        kind = type(thing)
        if kind is types.FunctionType and is_users(thing):
            self._add_names(thing.__code__, thing.__globals__)
        elif kind is types.FrameType and is_users_namespace(thing.f_globals):
            self._add_names(thing.f_code, thing.f_globals)
        elif issubclass(kind, types.ModuleType) and is_users(thing):
            self._modules.append(thing)
            self._add(named(vars(thing), self._names))

    def _add_names(self, code, namespace):
        names = names_in(code)
        self._add(named(namespace, names))
        self._add(_imported(code, namespace.get("__package__"), names))
        new = [name for name in names if name not in self._names]
        self._names.update(dict.fromkeys(new))
        for module in self._modules:
            self._add(named(vars(module), new))


def reachable(things):
    """Returns all objects that can be reached."""
    return Reach(things).things


def tensors_within(things):
    """Returns the tensors among objects, and all that can be reached from those that are none."""
    others = [thing for thing in things if not isinstance(thing, Tensor)]
    return [each for each in (*things, *reachable(others)) if isinstance(each, Tensor)]


def named(namespace, names):
    """Returns what a namespace has under some names."""
    return [namespace[name] for name in names if name in namespace]


def names_in(code):
    """Returns the names in code, and its texts that may be names, as in `globals()["STATE"]`."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(names_in(constant))
        elif isinstance(constant, str) and constant.isidentifier():
            names[constant] = None
    return names


def _imported(code, package, names):
    """Returns the modules that code may import while it runs, as far as they have been imported."""
    if not _has_imports(code):
        return []
    parts = (package or "").split(".")
    prefixes = ["", *(".".join(parts[: i + 1]) + "." for i in range(len(parts)))]
    found = (sys.modules.get((prefix + name).strip(".")) for prefix in prefixes for name in names)
    return [module for module in found if module is not None]


def _has_imports(code):
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return _IMPORT_NAME in code.co_code[::2] or any(map(_has_imports, inner))
