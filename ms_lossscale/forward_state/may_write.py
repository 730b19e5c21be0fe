"""
Which Parameters and buffers some source may write: a crude reading that errs towards "may".

An expression stands for the real objects that its value may be, hold, or share memory with. Whatever may write one of
them counts as writing all that can be reached from it.
"""

import ast
import itertools
import re
import types

from mindspore import Tensor, nn

from ms_lossscale.forward_state.calls import MANY, SHARES, Calls, inner_function
from ms_lossscale.forward_state.reachable import is_users, reachable
from ms_lossscale.forward_state.source import imported_by
from ms_lossscale.forward_state.values import CONTAINERS, Bound, Row, elements, of, union

_CALCULATIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.FormattedValue, ast.JoinedStr)
_NOT_OF_A_FORWARD = ("__init__", "__new__", "__init_subclass__", "__repr__", "__str__")


class Reading(Calls):
    """
    Reads what forwards may write.

    Attributes:
        written (dict): The tensors, by identity.
        doubted (dict): Tensors of which it can't be decided, each with the reason.
    """

    def __init__(self):
        super().__init__()
        self.written, self.doubted = {}, {}

    def read(self, thing, given=None):
        """Reads all that may run of an object in a forward or a backward, of whose inputs `given` may be each."""
        inputs = {} if given is None else of(given)
        try:
            for function in [thing] if given is not None else _entries(thing):
                self.read_call(function, [inputs] * MANY)
        except Exception as error:
            why = f"'{type(thing).__name__}' can't be followed: {error or type(error).__name__}"
            self.doubt(union(of(thing), inputs), why)

    def write(self, values):
        self.written.update(of(*(each for each in reachable(values.values()) if isinstance(each, Tensor))))

    def doubt(self, values, why):
        for each in reachable(values.values()):
            if isinstance(each, Tensor):
                self.doubted.setdefault(id(each), (each, why))

    def row(self, *positions):
        """The same object each time, so that what is read twice is known."""
        key = tuple(tuple(values) for values in positions)
        return of(self.made.setdefault(key, Row(tuple(values.values()) for values in positions)))

    # Statements
    def run(self, statements, frame):
        for node in statements:
            getattr(self, f"_{type(node).__name__}", self._parts)(node, frame)

    def _parts(self, node, frame, times=1):
        """What runs perhaps, and in a loop more than once."""
        frame.parts += 1
        for child in [*ast.iter_child_nodes(node)] * times:
            if isinstance(child, ast.expr):
                self.evaluate(child, frame)
            else:
                self.run([child], frame)
        frame.parts -= 1

    def _FunctionDef(self, node, frame):
        function = self.made.setdefault((id(node), id(frame)), Bound(node, [], frame))
        frame.assign(node.name, of(function))

    def _Return(self, node, frame):
        if node.value is not None:
            frame.returned.update(self.evaluate(node.value, frame))

    _Yield = _Return

    def _Assign(self, node, frame):
        values = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, values, frame)

    def _AnnAssign(self, node, frame):
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)

    def _AugAssign(self, node, frame):
        values, old = self.evaluate(node.value, frame), self.evaluate(node.target, frame)
        self.write(of(*(each for each in old.values() if not isinstance(each, CONTAINERS))))
        self.grow(node.target, values, frame)

    def _For(self, node, frame):
        frame.parts += 1
        self.assign(node.target, elements(self.evaluate(node.iter, frame)), frame)
        self.run([*node.body, *node.body, *node.orelse], frame)
        frame.parts -= 1

    def _While(self, node, frame):
        self._parts(node, frame, times=2)

    def _withitem(self, node, frame):
        values = self.evaluate(node.context_expr, frame)
        if node.optional_vars is not None:
            self.assign(
                node.optional_vars, union(values, self._apply(self.attribute(values, "__enter__"), [], {})), frame
            )

    def _match_case(self, node, frame):
        for part in ast.walk(node.pattern):
            for name in filter(None, (getattr(part, "name", None), getattr(part, "rest", None))):
                frame.assign(name, frame.read("match"))
        self._parts(node, frame)

    def _Match(self, node, frame):
        subject = self.evaluate(node.subject, frame)
        frame.assign("match", union(subject, elements(subject)))
        self._parts(node, frame)

    def _Import(self, node, frame):
        for name, thing in imported_by(node, frame.function.__globals__.get("__package__")):
            frame.assign(name, of(thing))

    _ImportFrom = _Import

    def assign(self, target, values, frame):
        if isinstance(target, ast.Name):
            frame.assign(target.id, values)
        elif isinstance(target, (ast.Tuple, ast.List)):
            rows = [thing for thing in values.values() if isinstance(thing, Row) and len(thing) == len(target.elts)]
            for i, each in enumerate(target.elts):
                exact = len(rows) == len(values) and not isinstance(each, ast.Starred)
                its = of(*itertools.chain(*(row[i] for row in rows))) if exact else elements(elements(values))
                self.assign(each, its, frame)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, values, frame)
        elif isinstance(target, ast.Attribute):
            present = self.attribute(self.evaluate(target.value, frame), target.attr)
            self.write(of(*(each for each in present.values() if isinstance(each, Tensor))))
        else:
            base = self.evaluate(target.value, frame)
            self.write(of(*(each for each in base.values() if not isinstance(each, (*CONTAINERS, nn.Cell)))))
            self.grow(target, values, frame)

    @staticmethod
    def grow(target, values, frame):
        """A container that a name stands for may now hold these as well."""
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            frame.names[target.id] = union(frame.read(target.id), values)

    # Expressions
    def evaluate(self, node, frame):
        return getattr(self, f"_{type(node).__name__}", self._any_expression)(node, frame)

    def _any_expression(self, node, frame):
        values = union(
            *(self.evaluate(each, frame) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
        )
        if isinstance(node, _CALCULATIONS):
            # New tensors; but containers and strings are joined.
            return {key: thing for key, thing in values.items() if isinstance(thing, (str, *CONTAINERS))}
        return values

    def _Name(self, node, frame):
        return frame.read(node.id)

    def _Constant(self, node, frame):
        return of(node.value) if isinstance(node.value, str) else {}

    def _Tuple(self, node, frame):
        values = [self.evaluate(each, frame) for each in node.elts]
        return union(*values) if any(isinstance(each, ast.Starred) for each in node.elts) else self.row(*values)

    _List = _Set = _Tuple

    def _Starred(self, node, frame):
        return elements(self.evaluate(node.value, frame))

    def _Subscript(self, node, frame):
        self.evaluate(node.slice, frame)
        return elements(self.evaluate(node.value, frame))

    def _ListComp(self, node, frame):
        for generator in node.generators:
            self.assign(generator.target, elements(self.evaluate(generator.iter, frame)), frame)
            self._any_expression(generator, frame)
        return self.row(self._any_expression(node, frame))

    _SetComp = _GeneratorExp = _DictComp = _ListComp

    def _Lambda(self, node, frame):
        return of(self.made.setdefault((id(node), id(frame)), Bound(node, [], frame)))

    def _NamedExpr(self, node, frame):
        values = self.evaluate(node.value, frame)
        self.assign(node.target, values, frame)
        return values

    def _Attribute(self, node, frame):
        values = self.evaluate(node.value, frame)
        tensors = {key: thing for key, thing in values.items() if isinstance(thing, Tensor)}
        return union(tensors if SHARES.fullmatch(node.attr) else {}, self.attribute(values, node.attr))

    def attribute(self, values, name):
        found = {}
        for thing in values.values():
            if isinstance(thing, (Tensor, Row, Bound, str)):
                continue
            computed = getattr(type(thing), name, None)
            if isinstance(computed, property):
                found.update(self._call_one(computed.fget, [of(thing)], {}) if is_users(computed.fget) else {})
                continue
            its = getattr(thing, name, None)
            found.update({} if its is None or isinstance(its, (int, float)) else of(its))
        # What `getattr` made anew, a bound method say, must stay what it is for as long as its identity counts.
        self.made.update((("attribute", key), thing) for key, thing in found.items())
        return found

    def attributes_named(self, owners, names, every=all):
        """`getattr` with a name of which parts may be known."""
        parts = [part for name in names.values() if isinstance(name, str) for part in re.split(r"%\w|\{.*?\}", name)]
        held = {name for thing in owners.values() for name in (*getattr(thing, "__dict__", ()), *_held_by_name(thing))}
        return union(*(self.attribute(owners, name) for name in held if every(part in name for part in parts)))


def _held_by_name(thing):
    return [name for part in ("_params", "_buffers", "_cells") for name in getattr(thing, part, None) or ()]


def _entries(thing):
    """The functions of an object that a forward or a backward calls without naming them."""
    if isinstance(thing, nn.Cell):
        hooks = (thing._forward_pre_hook, thing._forward_hook, thing._backward_pre_hook, thing._backward_hook)
        yield from (hook for each in hooks if isinstance(each, dict) for hook in each.values())
        if is_users(inner_function(thing.construct)):
            yield thing.construct
        if hasattr(type(thing), "bprop"):
            yield thing.bprop
    for cls in type(thing).__mro__ if is_users(type(thing)) else ():
        for name, method in vars(cls).items():
            if not isinstance(method, types.FunctionType) or not is_users(method):
                continue
            if name.startswith("__") and name not in _NOT_OF_A_FORWARD:
                yield types.MethodType(method, thing)
