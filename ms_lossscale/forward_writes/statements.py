"""Runs through statements, in their order; where ways part, a name stands for what it may be on any of them."""

import ast
import importlib.util
import sys

from ms_lossscale.forward_writes.functions import CannotFollow
from ms_lossscale.forward_writes.mindspore_cells import is_of_mindspore
from ms_lossscale.forward_writes.values import NOTHING, Closure, Many, Values, elements, positions

_ONLY_EXPRESSIONS = (ast.Expr, ast.Assert, ast.Raise, ast.Delete)
_OF_NO_INTEREST = (ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal)


class Statements:
    """
    Args:
        reader (Reader): The other parts.
    """

    def __init__(self, reader):
        self._reader = reader

    def execute(self, statements, frame):
        for node in statements:
            getattr(self, f"_{type(node).__name__}", self._other)(node, frame)

    def _evaluate(self, node, frame):
        return self._reader.expressions.evaluate(node, frame)

    def _other(self, node, frame):
        if isinstance(node, _ONLY_EXPRESSIONS):
            for child in ast.iter_child_nodes(node):
                self._evaluate(child, frame)
        elif not isinstance(node, _OF_NO_INTEREST) and not is_of_mindspore(frame.function):
            raise CannotFollow(f"'{ast.unparse(node).splitlines()[0]}' is not a statement that is followed")

    def _FunctionDef(self, node, frame):
        frame.assign(node.name, Values.of(Closure(node, frame)))

    def _Return(self, node, frame):
        frame.give_back(self._evaluate(node.value, frame) if node.value else NOTHING)

    # Assignments
    def _Assign(self, node, frame):
        values = self._evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, values, frame)

    def _AnnAssign(self, node, frame):
        if node.value is not None:
            self.assign(node.target, self._evaluate(node.value, frame), frame)

    def _AugAssign(self, node, frame):
        target, values = node.target, self._evaluate(node.value, frame)
        written = target.value if isinstance(target, ast.Subscript) else target
        self._reader.findings.write(self._evaluate(written, frame))
        frame.grow(target, elements(values))

    def assign(self, target, values, frame):
        if isinstance(target, ast.Name):
            frame.assign(target.id, values)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each, its in zip(target.elts, positions(values, len(target.elts))):
                self.assign(each, its, frame)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Values.of(Many(values)), frame)
        elif isinstance(target, ast.Attribute):
            owners = self._evaluate(target.value, frame)
            self._reader.findings.write(self._reader.expressions.attribute(owners, target.attr))
        else:
            self._reader.findings.write(self._evaluate(target.value, frame))
            frame.grow(target.value, values)

    # Ways that part
    def _If(self, node, frame):
        truth = self._reader.expressions.truth(node.test, frame)
        before = dict(frame.names)
        if truth is not False:
            self.execute(node.body, frame)
        if truth is not True:
            after_body, frame.names = frame.names, before
            self.execute(node.orelse, frame)
            if truth is None:
                frame.join(after_body)

    def _For(self, node, frame):
        items = elements(self._evaluate(node.iter, frame))
        self._loop(node, frame, lambda: self.assign(node.target, items, frame))

    def _While(self, node, frame):
        self._loop(node, frame, lambda: self._evaluate(node.test, frame))

    def _loop(self, node, frame, begin):
        for _ in range(2):  # What its end assigns, its beginning may read.
            before = dict(frame.names)
            begin()
            self.execute(node.body, frame)
            frame.join(before)
        self.execute(node.orelse, frame)

    def _Try(self, node, frame):
        for block in (node.body, *(handler.body for handler in node.handlers), node.orelse):
            before = dict(frame.names)
            self.execute(block, frame)
            frame.join(before)
        self.execute(node.finalbody, frame)

    def _With(self, node, frame):
        for entered in node.items:
            values = self._evaluate(entered.context_expr, frame)
            if entered.optional_vars is not None:
                self.assign(entered.optional_vars, values, frame)
        self.execute(node.body, frame)

    # Modules that were not imported before hold nothing of the network's.
    def _Import(self, node, frame):
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            frame.assign(alias.asname or name, Values.of(sys.modules.get(name)))

    def _ImportFrom(self, node, frame):
        name = "." * node.level + (node.module or "")
        module = sys.modules.get(importlib.util.resolve_name(name, frame.function.__globals__.get("__package__")))
        for alias in node.names:
            frame.assign(alias.asname or alias.name, self._reader.expressions.attribute(Values.of(module), alias.name))
