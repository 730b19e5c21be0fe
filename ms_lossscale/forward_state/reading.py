"""
Finds the tensors that source code may write to. The reading is crude, and in doubt says "may write".

A name stands for all real objects that it may ever refer to, or that such containers hold. The order of statements and
their conditions are ignored. All functions that may run are read again until nothing new is found.
"""

import ast
import functools
import re
import types

from mindspore import Tensor, nn

from ms_lossscale.forward_state.attributes import found_as, getters, setters
from ms_lossscale.forward_state.budget import Budget, OutOfBudget
from ms_lossscale.forward_state.entries import inner_function
from ms_lossscale.forward_state.names import BY_NAME, QUERIES, SHARES, WRITES
from ms_lossscale.forward_state.others import functions_inside, written_by
from ms_lossscale.forward_state.ownership import is_foreign, is_users, module_of
from ms_lossscale.forward_state.reachable import OPTIMIZERS, named, names_in, tensors_within
from ms_lossscale.forward_state.source import (
    assignments,
    expressions_in,
    imported,
    names_that_may_be,
    outside,
    parameter_names,
    tree_of,
)
from ms_lossscale.forward_state.static import instance_dict, is_a
from ms_lossscale.forward_state.values import (
    SOME_CONTAINER,
    Function,
    Partial,
    called,
    elements,
    functions_in,
    has_containers,
    of,
    tensors,
    union,
)

_NEW_TENSORS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.FormattedValue, ast.JoinedStr)
_CONTAINERS_IN_SOURCE = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
# More arguments than functions have, for when it is unknown which is which; and far more rounds than are ever needed.
_MANY, _MOST_ROUNDS = 20, 100
# So many calls, expressions and attributes are looked at, which takes a second or two, and more for each cell.
_LOOKS, _LOOKS_FOR_A_CELL = 50_000, 50
# So many objects are passed on in the time of a look.
_FOR_A_LOOK = 10


class Reading:
    """
    Reads which tensors forwards may write to.

    Args:
        cells (int): The number of cells. With more of them, it may take longer.

    Attributes:
        written (dict): These tensors, by identity.
        doubted (dict): Tensors for which the reading is inconclusive, by identity, each with the reason.
        is_complete (bool): Whether it came to an end. If not, any tensor may be written.
    """

    def __init__(self, cells=0):
        self.written, self.doubted = {}, {}
        # Objects are kept alive so that their identities stay unique.
        self._functions, self._kept = {}, {}
        # What may be assigned to attributes and globals, by name.
        self._assigned = {}
        self._is_news = False
        self._budget, self.is_complete = Budget(_LOOKS + _LOOKS_FOR_A_CELL * cells), True

    def read(self, functions, given=()):
        """Reads what may run if the functions are called with any of the given objects."""
        try:
            self._read_all(functions, given)
        except OutOfBudget:
            self.is_complete = False

    def _read_all(self, functions, given):
        for _ in range(_MOST_ROUNDS):
            # Doubts of earlier rounds may be gone when more is known.
            self._is_news = False
            self.doubted.clear()
            for function in functions:
                self._call(function, [of(*given)] * _MANY, {})
            for reader in list(self._functions.values()):
                self._read(reader)
            if not self._is_news:
                return
        for reader in self._functions.values():
            self._doubt_all(reader, "it has no end")

    def _read(self, reader):
        try:
            if isinstance(reader.node, ast.Lambda):
                self._add(reader.returned, self._evaluate(reader.node.body, reader))
            for node in ast.walk(reader.node):
                self._visit(node, reader)
        except OutOfBudget:
            raise
        except Exception as error:
            self._doubt_all(reader, error)

    def _doubt_all(self, reader, error):
        owner = reader.function.__qualname__.partition(".")[0]
        self._doubt(union(*reader.names.values()), f"'{owner}' can't be followed: {error or type(error).__name__}")

    def _add(self, known, values):
        if not values.keys() <= known.keys():
            known.update(values)
            self._is_news = True

    def _write(self, values):
        new = [each for key, each in values.items() if key not in self.written]
        self.written.update((id(each), each) for each in tensors_within(new))

    def _doubt(self, values, why):
        for each in tensors_within(values.values()):
            self.doubted.setdefault(id(each), (each, why))

    def _visit(self, node, reader):
        for target, value, iterates in assignments(node):
            values = self._evaluate(value, reader)
            self._assign(target, elements(values) if iterates else values, reader)
            if isinstance(node, ast.withitem):
                enter = self._attribute(values, "__enter__")
                self._assign(target, self._call_all(enter, [], {}), reader)
        if isinstance(node, ast.AugAssign):
            values, old = self._evaluate(node.value, reader), self._evaluate(node.target, reader)
            if has_containers(values):
                self._grow(node.target, values, reader)
            if not (has_containers(values) and has_containers(old)):
                self._write(elements(old))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, value in imported(node, reader.function.__globals__.get("__package__")):
                self._grow(ast.Name(name), of(value), reader)
        elif isinstance(node, ast.FunctionDef) and node is not reader.node:
            self._grow(ast.Name(node.name), self._local(node, reader), reader)
        elif isinstance(node, ast.Global):
            for name in node.names:
                self._grow(ast.Attribute(node, name), self._evaluate(ast.Name(name), reader), reader)
                reader.names[name] = self._assigned[name]
        elif hasattr(node, "subject"):
            names = {getattr(part, "name", None) or getattr(part, "rest", None) for part in ast.walk(node)}
            for name in names - {None}:
                self._grow(ast.Name(name), self._evaluate(node.subject, reader), reader)
        elif isinstance(node, (ast.stmt, ast.comprehension, ast.withitem, ast.ExceptHandler)):
            values = union(*(self._evaluate(each, reader) for each in expressions_in(node)))
            self._add(reader.returned, values if isinstance(node, ast.Return) else {})

    def _assign(self, target, values, reader):
        if isinstance(target, ast.Starred):
            self._assign(target.value, values, reader)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._assign(each, elements(values), reader)
        elif isinstance(target, ast.Name):
            self._grow(target, values, reader)
        else:
            is_part = isinstance(target, ast.Subscript)
            present = self._evaluate(target.value if is_part else target, reader)
            self._write(elements(present, nn.Cell) if is_part else tensors(present))
            if has_containers(present) or not tensors(present):
                self._grow(target, values, reader)
            if not is_part:
                self._set(self._evaluate(target.value, reader), target.attr, values)

    def _set(self, owners, name, values):
        for owner in elements(owners, Tensor, Function, Partial).values():
            self._call_all(of(*setters(owner, name)), [values], {})

    def _grow(self, target, values, reader):
        """Adds these values to what a target may be or hold."""
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            self._add(reader.names.setdefault(target.id, {}), values)
        elif isinstance(target, ast.Attribute):
            self._add(self._assigned.setdefault(target.attr, {}), values)

    # Expressions
    def _evaluate(self, node, reader):
        self._budget.spend(1)
        if isinstance(node, ast.Name):
            if node.id in reader.names:
                return reader.names[node.id]
            return {**of(outside(reader.function, node.id)), **self._assigned.get(node.id, {})}
        if isinstance(node, ast.Attribute):
            return self._attribute(self._evaluate(node.value, reader), node.attr)
        if isinstance(node, ast.Call):
            return self._evaluate_call(node, reader)
        if isinstance(node, ast.Lambda):
            self._add(reader.returned, self._evaluate(node.body, reader))
            return self._local(node, reader)
        values = union(*(self._evaluate(each, reader) for each in expressions_in(node)))
        self._budget.spend(len(values) // _FOR_A_LOOK)
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            self._add(reader.returned, values)
        if isinstance(node, _CONTAINERS_IN_SOURCE):
            return {**values, **SOME_CONTAINER}
        if isinstance(node, _NEW_TENSORS) and not has_containers(values):
            return {}
        return elements(values) if isinstance(node, (ast.Subscript, ast.Starred)) else values

    def _local(self, node, reader):
        local = self._keep(Function(reader.function, node, reader), id(node), id(reader))
        defaults = union(*(self._evaluate(each, reader) for each in node.args.defaults))
        self._give(local, [], {}, defaults)
        return of(local)

    def _attribute(self, values, name):
        found = {**self._assigned.get(name, {}), **(tensors(values) if SHARES.fullmatch(name) else {})}
        found.update(of(*(instance_dict(each).get(name) for each in tensors(values).values())))
        self._budget.spend(len(values))
        for thing in elements(values, Tensor, Function, Partial).values():
            methods, its = self._once(_looked_up, thing, name)
            found.update(self._call_all(of(*methods), [{}] * _MANY, {}))
            # A class also stands for its instances.
            functions = [each for each in its if isinstance(thing, type) and isinstance(each, types.FunctionType)]
            found.update(of(*its, *(types.MethodType(each, thing) for each in functions)))
        return found

    def _keep(self, new, *key):
        """Returns the first object that was given with this key."""
        return self._kept.setdefault((type(new), *key), new)

    def _once(self, look, thing, *args):
        """Returns what a function finds in an object, which the reading does not change."""
        key = (look, id(thing), *args)
        if key not in self._kept:
            self._kept[key] = thing, look(thing, *args)
        return self._kept[key][1]

    # Calls
    def _evaluate_call(self, node, reader):
        args = [self._evaluate(each, reader) for each in node.args]
        kwargs = {each.arg: self._evaluate(each.value, reader) for each in node.keywords}
        given = union(*args, *kwargs.values())
        if None in kwargs or any(isinstance(each, ast.Starred) for each in node.args):
            args, kwargs = [elements(given)] * _MANY, {}
        func, name = node.func, getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == "globals":
            return of(*named(reader.function.__globals__, names_in(reader.function.__code__)))
        if name == "super":
            return self._super(args, reader)
        receivers = self._evaluate(func.value, reader) if isinstance(func, ast.Attribute) else {}
        if BY_NAME.fullmatch(name):
            return self._by_name(node.args, name, args, receivers)
        functions = called(self._attribute(receivers, name) if receivers else self._evaluate(func, reader))
        # An unknown function may call what is passed to it, such as a hook.
        found = self._call_all(functions, args, kwargs) if functions else self._call_all(functions_in(given), [], {})
        is_of_tensor = isinstance(func, ast.Attribute) and hasattr(Tensor, name) and not elements(receivers, Tensor)
        if WRITES.fullmatch(name):
            self._write(tensors(receivers) if functions else receivers)
        elif has_containers(receivers):
            self._grow(func.value, given, reader)
            return {**found, **elements(receivers), **given}
        elif not functions and not is_of_tensor:
            self._doubt(given, f"it is passed to '{ast.unparse(func)}', which is not known")
        shares = WRITES.fullmatch(name) or SHARES.fullmatch(name)
        return {**found, **(tensors(receivers) if shares else {})}

    def _by_name(self, nodes, name, args, receivers):
        is_set = "setattr" in name
        # A bound method has no argument for the owner.
        is_bound = name.startswith("__") and len(nodes) == (2 if is_set else 1)
        owners, its_name = (receivers, nodes[0]) if is_bound else (args[0], nodes[1])
        found = union(*(self._attribute(owners, each) for each in names_that_may_be(its_name, owners)))
        self._write(tensors({**owners, **found}) if is_set else {})
        return found

    def _super(self, args, reader):
        own = [ast.Name(name) for name in ("__class__", reader.function.__code__.co_varnames[0])]
        classes, owners = args or [self._evaluate(name, reader) for name in own]
        pairs = [(cls, its) for cls in classes.values() for its in owners.values() if isinstance(cls, type)]
        parents = (self._keep(super(cls, its), id(cls), id(its)) for cls, its in pairs if is_a(its, cls))
        return of(*parents)

    def _call_all(self, functions, args, kwargs):
        return union(*(self._call(function, args, kwargs) for function in called(functions).values()))

    def _call(self, function, args, kwargs):
        """Returns what a call may return."""
        given = union(*args, *kwargs.values())
        self._budget.spend(1 + len(given) // _FOR_A_LOOK)
        if isinstance(function, types.MethodType):
            return self._call_method(function, function.__self__, args, kwargs)
        if isinstance(function, functools.partial):
            return self._call(function.func, [*map(of, function.args), *args], kwargs)
        if isinstance(function, Partial):
            return self._call(function.function, [*function.args, *args], kwargs)
        if isinstance(function, Function):
            return self._give(function, args, kwargs, {})
        if isinstance(function, OPTIMIZERS):
            self._write(of(function))
            return {}
        # What knows nothing of MindSpore can write only what it is given.
        gets_state = any(isinstance(each, (Tensor, nn.Cell)) for each in given.values())
        is_read = is_users(function) or (gets_state and is_foreign(function))
        if isinstance(function, type) and issubclass(function, OPTIMIZERS):
            self._write(given)
        if isinstance(function, types.FunctionType):
            # `functools.singledispatch` has several functions inside.
            inner = [getattr(function, "__wrapped__", None), *getattr(function, "registry", {}).values()]
            inner = self._call_all(of(*inner), args, kwargs)
            return {**inner, **(self._enter if is_read else self._call_of_others)(function, args, kwargs)}
        construct = found_as(function, "construct") if isinstance(function, nn.Cell) else []
        if any(is_users(inner_function(each)) for each in construct):
            return self._call_all(of(*construct), args, kwargs)
        if isinstance(function, type) and is_read:
            # From then on, any method of the class may run with what it was given.
            methods = [each for each in vars(function).values() if isinstance(each, types.FunctionType)]
            return {**given, **self._call_all(of(*methods), [{**given, **of(function)}] * _MANY, {}), **of(function)}
        if not is_read:
            return self._call_of_others(function, args, kwargs)
        if isinstance(type(function).__call__, types.FunctionType):
            return self._call(type(function).__call__, [of(function), *args], kwargs)
        self._doubt(given, f"it is passed to {type(function).__name__!r}, which can't be read")
        return {}

    def _call_method(self, method, owner, args, kwargs):
        if isinstance(owner, OPTIMIZERS):
            self._write(of(owner))
        if isinstance(owner, type) and is_users(owner) and method.__name__ == "apply" and hasattr(owner, "backward"):
            # MindSpore's `_Function`: the class stands for the `ctx` that the other parts are given.
            self._add(self._assigned.setdefault("saved_tensors", {}), union(*args, *kwargs.values()))
            self._call_all(of(owner.backward), [of(owner)], {})
            self._call_all(of(owner.setup_context), [of(owner), *[union(*args, *kwargs.values())] * 2], {})
            return self._call(owner.forward, [of(owner), *args], kwargs)
        return self._call(method.__func__, [of(owner), *args], kwargs)

    def _enter(self, function, args, kwargs):
        node = tree_of(function.__code__)
        if node is None:
            held = [of(cell.cell_contents) for cell in function.__closure__ or ()]
            why = f"it is passed to '{function.__qualname__}', whose source can't be read"
            self._doubt(union(*args, *kwargs.values(), *held), why)
            return {}
        if id(function) not in self._functions:
            self._functions[id(function)], self._is_news = Function(function, node), True
        defaults = of(*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return self._give(self._functions[id(function)], args, kwargs, defaults)

    def _give(self, reader, args, kwargs, defaults):
        names = parameter_names(reader.node)
        for i, name in enumerate(names):
            values = args[i] if i < len(args) else kwargs.get(name, defaults)
            self._add(reader.names.setdefault(name, {}), values)
        rest = union(SOME_CONTAINER, *args[len(names) :], *(kwargs[name] for name in kwargs if name not in names))
        for more in filter(None, (reader.node.args.vararg, reader.node.args.kwarg)):
            self._add(reader.names.setdefault(more.arg, {}), rest)
        return reader.returned

    def _call_of_others(self, function, args, kwargs):
        """Returns what a call of a function, class or primitive of MindSpore's or Python's may return."""
        cls = function if isinstance(function, type) else type(function)
        name = getattr(function, "__name__", cls.__name__)
        module = (module_of(function) or module_of(cls)).partition(".")[0]
        given = union(*args, *kwargs.values())
        if name.lower() == "partial":
            functions = called(args[0]).values()
            return of(*(self._keep(Partial(f, args[1:]), id(f), *map(frozenset, args)) for f in functions))
        self._write(written_by(function, name, module, args, kwargs))
        if name == "Custom":
            self._doubt(given, "it is passed to an ops.Custom")
        self._run_within(function, name, args, kwargs)
        if QUERIES.fullmatch(name):
            return args[0]
        # A class also stands for its instances, and a class of Python's for a container of its arguments.
        instance = of(function) if isinstance(function, type) else {}
        if module not in ("mindspore", "_c_expression"):
            return {**elements(given), **instance, **(SOME_CONTAINER if instance else {})}
        return {**elements(given), **instance} if SHARES.fullmatch(name) else instance

    def _run_within(self, function, name, args, kwargs):
        """Calls the functions that MindSpore or Python would call with the other arguments."""
        self._call_all(self._once(functions_inside, function), args, kwargs)
        others = [elements(values) for values in args if not functions_in(values)]
        if re.fullmatch(r"(?i)\w*grad\w*|vjp|jvp", name):
            others = []  # For example, the weights to differentiate by.
        elif not re.fullmatch(r"(?i)\w*(map|reduce)", name):
            others = [union(*others)] * _MANY
        self._call_all(functions_in(union(*args, *kwargs.values())), others, {})
        if isinstance(function, nn.Cell):
            self._call_all(of(*function.cells()), args, kwargs)


def _looked_up(thing, name):
    return getters(thing, name), found_as(thing, name)
