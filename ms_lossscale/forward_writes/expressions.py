"""What an expression may stand for, and what evaluating it writes."""

import ast
import re
import types

from mindspore import Tensor, nn

from ms_lossscale.forward_writes.mindspore_cells import is_of_mindspore
from ms_lossscale.forward_writes.mindspore_internals import attributes_of
from ms_lossscale.forward_writes.tensors import attribute_of_tensor
from ms_lossscale.forward_writes.values import (
    NOTHING,
    Closure,
    Made,
    Many,
    Parent,
    Partial,
    Row,
    StandIn,
    Text,
    Values,
    elements,
    is_container,
    is_plain,
    is_state,
    item,
    union,
)

_ANY_TEXT = ".*"


class Expressions:
    """
    Args:
        reader (Reader): The other parts.
    """

    def __init__(self, reader):
        self._reader = reader

    def evaluate(self, node, frame):
        return getattr(self, f"_{type(node).__name__}", self._other)(node, frame)

    def _other(self, node, frame):
        """What gives a new tensor or a number."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.evaluate(child, frame)
        return NOTHING

    def truth(self, test, frame):
        """Whether a condition holds, where it is an argument that is known to be None or False; or None."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand, frame)
            return None if inner is None else not inner
        self.evaluate(test, frame)
        if isinstance(test, ast.Name):
            values = list(frame.read(test.id).values())
            return False if len(values) == 1 and (values[0] is None or values[0] is False) else None
        return None

    # Names and constants
    def _Name(self, node, frame):
        return frame.read(node.id)

    def _Constant(self, node, frame):
        return Values.of(node.value)

    def _JoinedStr(self, node, frame):
        return _text("".join(pattern_of(self.evaluate(part, frame)) for part in node.values))

    def _FormattedValue(self, node, frame):
        return self.evaluate(node.value, frame)

    # Containers
    def _Tuple(self, node, frame):
        values = [self.evaluate(each, frame) for each in node.elts]
        if any(isinstance(each, ast.Starred) for each in node.elts):
            return Values.of(Many(union(values)))
        return Values.of(Row(values))

    _List = _Set = _Tuple

    def _Dict(self, node, frame):
        return Values.of(Many(union(self.evaluate(each, frame) for each in node.values)))

    def _Starred(self, node, frame):
        return elements(self.evaluate(node.value, frame))

    def _ListComp(self, node, frame):
        for generator in node.generators:
            items = elements(self.evaluate(generator.iter, frame))
            self._reader.statements.assign(generator.target, items, frame)
            for test in generator.ifs:
                self.evaluate(test, frame)
        return Values.of(Many(self.evaluate(node.value if isinstance(node, ast.DictComp) else node.elt, frame)))

    _SetComp = _GeneratorExp = _DictComp = _ListComp

    def _Subscript(self, node, frame):
        holders = self.evaluate(node.value, frame)
        index = self.evaluate(node.slice, frame)
        if isinstance(node.slice, ast.Slice):
            kept = Values((k, thing) for k, thing in holders.items() if is_state(thing))
            return union([kept, Values.of(Many(elements(holders)))]) if len(kept) < len(holders) else kept
        known = next(iter(index.values())) if len(index) == 1 else None
        return union(item(thing, known if isinstance(known, (int, str)) else None) for thing in holders.values())

    # Operators
    def _BinOp(self, node, frame):
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        texts = [pattern_of(values) for values in (left, right)]
        if isinstance(node.op, ast.Add) and texts != [_ANY_TEXT] * 2:
            return _text("".join(texts))
        if isinstance(node.op, ast.Mod) and texts[0] != _ANY_TEXT:
            return formatted(left)
        # Containers are joined; a sum of tensors is a new one.
        containers = [thing for values in (left, right) for thing in values.values() if is_container(thing)]
        return Values.of(Many(elements(Values.of(*containers)))) if containers else NOTHING

    def _BoolOp(self, node, frame):
        return union([self.evaluate(each, frame) for each in node.values])

    def _IfExp(self, node, frame):
        truth = self.truth(node.test, frame)
        chosen = [each for each, excluded in ((node.body, False), (node.orelse, True)) if truth is not excluded]
        return union([self.evaluate(each, frame) for each in chosen])

    def _NamedExpr(self, node, frame):
        values = self.evaluate(node.value, frame)
        self._reader.statements.assign(node.target, values, frame)
        return values

    # Functions
    def _Lambda(self, node, frame):
        return Values.of(Closure(node, frame))

    def _Yield(self, node, frame):
        frame.give_back(Values.of(Many(self.evaluate(node.value, frame) if node.value else NOTHING)))
        return NOTHING

    def _Call(self, node, frame):
        return self._reader.calls.read(node, frame)

    # Attributes
    def _Attribute(self, node, frame):
        return self.attribute(self.evaluate(node.value, frame), node.attr)

    def attribute(self, values, name):
        return union([self._attribute_of(thing, name) for thing in values.values()])

    def _attribute_of(self, thing, name):
        if is_state(thing):
            return attribute_of_tensor(thing, name)
        if isinstance(thing, Parent):
            method = getattr(thing.cls, name, None)
            return Values.of(types.MethodType(method, thing.owner)) if callable(method) else NOTHING
        if isinstance(thing, Made):
            method = getattr(thing.cls, name, None)
            return Values.of(Partial(method, [Values.of(thing)])) if isinstance(method, types.FunctionType) else NOTHING
        if isinstance(thing, (Tensor, StandIn)):
            return NOTHING
        computed = getattr(type(thing), name, None)
        if isinstance(computed, property) and not is_of_mindspore(computed.fget):
            return self._reader.functions.call(computed.fget, [Values.of(thing)], {})
        try:
            found = getattr(thing, name)
        except AttributeError:
            return NOTHING
        # A number or a None may be another one at the next step; a name of an attribute hardly.
        of_interest = isinstance(found, str) or not (is_plain(found) or isinstance(found, Tensor))
        return Values.of(found) if of_interest or is_state(found) else NOTHING

    def attributes_named(self, owners, names):
        """`getattr` with a name of which a set of strings or patterns may be known."""
        pattern = pattern_of(names)
        exact = [name for name in names.values() if isinstance(name, str)]
        found = [self.attribute(owners, name) for name in exact]
        for owner in owners.values():
            if isinstance(owner, nn.Cell):
                attributes = attributes_of(owner).items()
                found.append(Values.of(*(each for name, each in attributes if re.fullmatch(pattern, name))))
        return union(found)


def pattern_of(values):
    """A regular expression for the strings that `values` may be."""
    return _either([t.pattern if isinstance(t, Text) else re.escape(t) for t in _texts(values)], values)


def formatted(values):
    """What `%` and `format` may make of these strings."""
    parts = [re.split(r"%[-.\d]*[a-z]|\{.*?\}", t) for t in _texts(values) if isinstance(t, str)]
    return _text(_either([_ANY_TEXT.join(map(re.escape, each)) for each in parts], values))


def _texts(values):
    return [thing for thing in values.values() if isinstance(thing, (str, Text))]


def _either(patterns, values):
    return f"(?:{'|'.join(patterns)})" if patterns and len(patterns) == len(values) else _ANY_TEXT


def _text(pattern):
    return Values.of(Text(pattern))
