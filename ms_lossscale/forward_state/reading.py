"""
Which tensors some source may write: a crude reading that errs towards "may".

A name stands for all real objects that its value may ever be, or that such containers hold. In which order a function
does what, and under which condition, is not asked. All functions that may run are read until nothing new comes up.
"""

import ast
import contextlib
import functools
import re
import types

from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import Primitive

from ms_lossscale.forward_state.reachable import LEAVES, OPTIMIZERS, SEQUENCES, is_users, reachable
from ms_lossscale.forward_state.source import (
    assignments,
    declares_writing,
    expressions_in,
    names_that_may_be,
    outside,
    parameter_names,
    tree_of,
)

# Methods of tensors that write them, and MindSpore's functions and primitives that write their first argument.
_WRITES = re.compile(r"(?!_).*[^_]_|set_data|(?i:assign)\w*|itemset|scatter_(?!nd$)\w+|index_add")
# Those whose result may be what they are given; gradients and maps give functions, which are called later.
_SHARES = re.compile(
    r"(?i)depend|load|stop_?gradient|identity|value|data|cast|astype|to|float|view|view_?as|reshape|transpose|permute"
    r"|m?t|flatten|ravel|squeeze|unsqueeze|expand_?dims|expand_?as|narrow|select|split|chunk|unbind|swapaxes|diagonal"
    r"|detach|assign\w*|\w*grad\w*|hypermap|map|vmap|jit|vjp|jvp"
)
# Methods of MindSpore's cells that give what they hold.
_QUERIES = re.compile(r"\w*(params|parameters|parameters_dict|buffers|cells|parameters_and_names|cells_and_names)")
_NEW_TENSORS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.FormattedValue, ast.JoinedStr)
_CONTAINERS_IN_SOURCE = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
_NOT_OF_A_FORWARD = ("__init__", "__new__", "__init_subclass__", "__repr__", "__str__")
_CONTAINERS = (*SEQUENCES, dict)
# Stands for a container that the source makes, whose elements stand beside it.
_SOME_CONTAINER = {"some": ()}
# More arguments than functions have, where it is not known which is which; and far more rounds than any source needs.
_MANY, _MOST_ROUNDS = 20, 100


class _Function:
    """A function that is read, or one within it, whose names and returned values count as its own."""

    def __init__(self, function, node, outer=None):
        self.function, self.node = function, node
        self.names, self.returned = (outer.names, outer.returned) if outer else ({}, {})


class _Partial:
    """A function with its first arguments."""

    def __init__(self, function, args):
        self.function, self.args = function, args


class Reading:
    """
    Reads what forwards may write.

    Attributes:
        written (dict): The tensors, by identity.
        doubted (dict): Tensors of which it can't be decided, by identity, each with the reason.
    """

    def __init__(self):
        self.written, self.doubted = {}, {}
        # What is kept must stay what it is for as long as its identity counts.
        self._functions, self._kept = {}, {}
        # What may be assigned to attributes and globals, by name.
        self._assigned = {}
        self._is_news = False

    def read(self, functions, given=()):
        """Reads what may run if functions are called with any of what is given."""
        for _ in range(_MOST_ROUNDS):
            # What can't be decided may only not be known yet.
            self._is_news = False
            self.doubted.clear()
            for function in functions:
                self._call(function, [_of(*given)] * _MANY, {})
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
        except Exception as error:
            self._doubt_all(reader, error)

    def _doubt_all(self, reader, error):
        owner = reader.function.__qualname__.partition(".")[0]
        self._doubt(_union(*reader.names.values()), f"'{owner}' can't be followed: {error or type(error).__name__}")

    def _add(self, known, values):
        if not values.keys() <= known.keys():
            known.update(values)
            self._is_news = True

    def _write(self, values):
        new = [values[key] for key in values.keys() - self.written.keys()]
        self.written.update((id(each), each) for each in reachable(new) if isinstance(each, Tensor))

    def _doubt(self, values, why):
        for each in reachable(values.values()):
            if isinstance(each, Tensor):
                self.doubted.setdefault(id(each), (each, why))

    def _visit(self, node, reader):
        for target, value in assignments(node):
            self._assign_parts(target, value, reader, is_loop=hasattr(node, "iter"))
            if isinstance(node, ast.withitem):
                enter = self._attribute(self._evaluate(value, reader), "__enter__")
                self._assign(target, self._call_all(enter, [], {}), reader)
        if isinstance(node, ast.AugAssign):
            values, old = self._evaluate(node.value, reader), self._evaluate(node.target, reader)
            if _containers(values):
                self._grow(node.target, values, reader)
            if not (_containers(values) and _containers(old)):
                self._write(_elements(old))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {"__package__": reader.function.__globals__.get("__package__")}
            with contextlib.suppress(ImportError):
                exec(compile(ast.Module([node], []), "<import>", "exec"), names)
            for name in names.keys() - {"__package__", "__builtins__"}:
                self._grow(ast.Name(name), _of(names[name]), reader)
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
            values = _union(*(self._evaluate(each, reader) for each in expressions_in(node)))
            self._add(reader.returned, values if isinstance(node, ast.Return) else {})

    def _assign_parts(self, target, value, reader, is_loop):
        """Of a tuple, and of `zip`, it is known which is which."""
        is_zip = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "zip"
        parts = value.args if is_zip else getattr(value, "elts", ())
        if len(getattr(target, "elts", ())) == len(parts) > 0 and not any(isinstance(n, ast.Starred) for n in parts):
            for each, part in zip(target.elts, parts):
                self._assign_parts(each, part, reader, is_zip)
        else:
            values = self._evaluate(value, reader)
            self._assign(target, _elements(values) if is_loop else values, reader)

    def _assign(self, target, values, reader):
        if isinstance(target, ast.Starred):
            self._assign(target.value, values, reader)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._assign(each, _elements(values), reader)
        elif isinstance(target, ast.Name):
            self._grow(target, values, reader)
        else:
            is_part = isinstance(target, ast.Subscript)
            present = self._evaluate(target.value if is_part else target, reader)
            self._write(_elements(present, nn.Cell) if is_part else _tensors(present))
            if _containers(present) or not _tensors(present):
                self._grow(target, values, reader)

    def _grow(self, target, values, reader):
        """What a target stands for may be, or hold, these as well."""
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            self._add(reader.names.setdefault(target.id, {}), values)
        elif isinstance(target, ast.Attribute):
            self._add(self._assigned.setdefault(target.attr, {}), values)

    # Expressions
    def _evaluate(self, node, reader):
        if isinstance(node, ast.Name):
            if node.id in reader.names:
                return reader.names[node.id]
            return {**_of(outside(reader.function, node.id)), **self._assigned.get(node.id, {})}
        if isinstance(node, ast.Attribute):
            return self._attribute(self._evaluate(node.value, reader), node.attr)
        if isinstance(node, ast.Call):
            return self._evaluate_call(node, reader)
        if isinstance(node, ast.Lambda):
            self._add(reader.returned, self._evaluate(node.body, reader))
            return self._local(node, reader)
        values = _union(*(self._evaluate(each, reader) for each in expressions_in(node)))
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            self._add(reader.returned, values)
        if isinstance(node, _CONTAINERS_IN_SOURCE):
            return {**values, **_SOME_CONTAINER}
        if isinstance(node, _NEW_TENSORS) and not _containers(values):
            return {}
        return _elements(values) if isinstance(node, (ast.Subscript, ast.Starred)) else values

    def _local(self, node, reader):
        local = self._keep(_Function(reader.function, node, reader), id(node), id(reader))
        defaults = _union(*(self._evaluate(each, reader) for each in node.args.defaults))
        self._give(local, [], {}, defaults)
        return _of(local)

    def _attribute(self, values, name):
        found = {**self._assigned.get(name, {}), **(_tensors(values) if _SHARES.fullmatch(name) else {})}
        for thing in _elements(values, Tensor, _Function, _Partial).values():
            computed = getattr(type(thing), name, None)
            if isinstance(computed, property) and is_users(computed.fget):
                found.update(self._call(computed.fget, [_of(thing)], {}))
            else:
                its = self._keep(_Partial(getattr(thing, name, None), ()), id(thing), name).function
                # A class also stands for its instances.
                is_method = isinstance(thing, type) and isinstance(its, types.FunctionType)
                found.update(_of(its, *([types.MethodType(its, thing)] if is_method else [])))
        return found

    def _keep(self, new, *key):
        """The first object that was given with this key."""
        return self._kept.setdefault((type(new), *key), new)

    # Calls
    def _evaluate_call(self, node, reader):
        args = [self._evaluate(each, reader) for each in node.args]
        kwargs = {each.arg: self._evaluate(each.value, reader) for each in node.keywords}
        given = _union(*args, *kwargs.values())
        if None in kwargs or any(isinstance(each, ast.Starred) for each in node.args):
            args, kwargs = [_elements(given)] * _MANY, {}
        func, name = node.func, getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in ("getattr", "setattr"):
            found = _union(*(self._attribute(args[0], each) for each in names_that_may_be(node.args[1], args[0])))
            self._write(_tensors(found) if name == "setattr" else {})
            return found
        if name == "super":
            return self._super(args, reader)
        receivers = self._evaluate(func.value, reader) if isinstance(func, ast.Attribute) else {}
        functions = _called(self._attribute(receivers, name) if receivers else self._evaluate(func, reader))
        # What is passed to what is not known may be called there, a hook say.
        found = self._call_all(functions, args, kwargs) if functions else self._call_all(_functions(given), [], {})
        is_of_tensor = isinstance(func, ast.Attribute) and hasattr(Tensor, name) and not _but(receivers, Tensor)
        if _WRITES.fullmatch(name):
            self._write(_tensors(receivers) if functions else receivers)
        elif _containers(receivers):
            self._grow(func.value, given, reader)
            return {**found, **_elements(receivers), **given}
        elif not functions and not is_of_tensor:
            self._doubt(given, f"it is passed to '{ast.unparse(func)}', which is not known")
        shares = _WRITES.fullmatch(name) or _SHARES.fullmatch(name)
        return {**found, **(_tensors(receivers) if shares else {})}

    def _super(self, args, reader):
        own = [ast.Name(name) for name in ("__class__", reader.function.__code__.co_varnames[0])]
        classes, owners = args or [self._evaluate(name, reader) for name in own]
        pairs = [(cls, its) for cls in classes.values() for its in owners.values() if isinstance(cls, type)]
        parents = (self._keep(super(cls, its), id(cls), id(its)) for cls, its in pairs if isinstance(its, cls))
        return _of(*parents)

    def _call_all(self, functions, args, kwargs):
        return _union(*(self._call(function, args, kwargs) for function in _called(functions).values()))

    def _call(self, function, args, kwargs):
        """What a call may return."""
        given = _union(*args, *kwargs.values())
        if isinstance(function, types.MethodType):
            return self._call(function.__func__, [_of(function.__self__), *args], kwargs)
        if isinstance(function, functools.partial):
            return self._call(function.func, [*map(_of, function.args), *args], kwargs)
        if isinstance(function, _Partial):
            return self._call(function.function, [*function.args, *args], kwargs)
        if isinstance(function, _Function):
            return self._give(function, args, kwargs, {})
        if isinstance(function, OPTIMIZERS):
            self._write(_of(function))
            return {}
        if isinstance(function, types.FunctionType):
            inner = self._call(function.__wrapped__, args, kwargs) if hasattr(function, "__wrapped__") else {}
            return {**inner, **(self._enter if is_users(function) else self._call_of_others)(function, args, kwargs)}
        if isinstance(function, nn.Cell) and is_users(inner_function(function.construct)):
            return self._call(function.construct, args, kwargs)
        if isinstance(function, type) and is_users(function):
            # From then on, all that the class can do to what it was given may be done.
            methods = [each for each in vars(function).values() if isinstance(each, types.FunctionType)]
            return {**given, **self._call_all(_of(*methods), [{**given, **_of(function)}] * _MANY, {}), **_of(function)}
        if not is_users(function if hasattr(function, "__module__") else type(function)):
            return self._call_of_others(function, args, kwargs)
        if isinstance(type(function).__call__, types.FunctionType):
            return self._call(type(function).__call__, [_of(function), *args], kwargs)
        self._doubt(given, f"it is passed to {function!r}, which can't be read")
        return {}

    def _enter(self, function, args, kwargs):
        node = tree_of(function.__code__)
        if node is None:
            held = [_of(cell.cell_contents) for cell in function.__closure__ or ()]
            why = f"it is passed to '{function.__qualname__}', whose source can't be read"
            self._doubt(_union(*args, *kwargs.values(), *held), why)
            return {}
        if id(function) not in self._functions:
            self._functions[id(function)], self._is_news = _Function(function, node), True
        defaults = _of(*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return self._give(self._functions[id(function)], args, kwargs, defaults)

    def _give(self, reader, args, kwargs, defaults):
        names = parameter_names(reader.node)
        for i, name in enumerate(names):
            values = args[i] if i < len(args) else kwargs.get(name, defaults)
            self._add(reader.names.setdefault(name, {}), values)
        rest = _union(_SOME_CONTAINER, *args[len(names) :], *(kwargs[name] for name in kwargs if name not in names))
        for more in filter(None, (reader.node.args.vararg, reader.node.args.kwarg)):
            self._add(reader.names.setdefault(more.arg, {}), rest)
        return reader.returned

    def _call_of_others(self, function, args, kwargs):
        """A function, class or primitive of MindSpore's or Python's."""
        cls = function if isinstance(function, type) else type(function)
        name = getattr(function, "__name__", cls.__name__)
        module = (getattr(function, "__module__", None) or cls.__module__).partition(".")[0]
        given = _union(*args, *kwargs.values())
        if name.lower() == "partial":
            functions = _called(args[0]).values()
            return _of(*(self._keep(_Partial(f, args[1:]), id(f), *map(frozenset, args)) for f in functions))
        may_renormalise = "max_norm" in kwargs or (name.startswith("embedding") and len(args) > 3)
        if name == "Custom":
            self._doubt(given, "it is passed to an ops.Custom")
        elif name.startswith("batch_norm"):
            self._write(_union(*args[1:3], kwargs.get("running_mean", {}), kwargs.get("running_var", {})))
        elif _WRITES.fullmatch(name) or module in ("operator", "_operator"):
            self._write(args[0] if args else given)
        elif may_renormalise or (issubclass(cls, Primitive) and declares_writing(cls)):
            self._write(given)
        self._run_within(function, name, args, kwargs)
        if _QUERIES.fullmatch(name):
            return args[0]
        # A class also stands for its instances, and one of Python's for a container of what it is given.
        instance = _of(function) if isinstance(function, type) else {}
        if module not in ("mindspore", "_c_expression"):
            return {**_elements(given), **instance, **(_SOME_CONTAINER if instance else {})}
        return {**_elements(given), **instance} if _SHARES.fullmatch(name) else instance

    def _run_within(self, function, name, args, kwargs):
        """The functions that MindSpore or Python calls with what else it is given."""
        held = vars(function).values() if hasattr(function, "__dict__") and not isinstance(function, type) else ()
        if isinstance(function, ops.MultitypeFuncGraph):
            held = [entry[-1] for entry in function.entries]
        self._call_all(_functions(_of(*held)), args, kwargs)
        others = [_elements(values) for values in args if not _functions(values)]
        if re.fullmatch(r"(?i)\w*grad\w*|vjp|jvp", name):
            others = []  # The weights, say, by which it differentiates.
        elif not re.fullmatch(r"(?i)\w*(map|reduce)", name):
            others = [_union(*others)] * _MANY
        self._call_all(_functions(_union(*args, *kwargs.values())), others, {})
        if isinstance(function, nn.Cell):
            self._call_all(_of(*function.cells()), args, kwargs)


def entries(thing):
    """The functions of an object that a forward or a backward calls without naming them."""
    if isinstance(thing, nn.Cell):
        hooks = (thing._forward_pre_hook, thing._forward_hook, thing._backward_pre_hook, thing._backward_hook)
        yield from (hook for each in hooks if isinstance(each, dict) for hook in each.values())
        yield from filter(lambda each: is_users(inner_function(each)), [thing.construct, getattr(thing, "bprop", None)])
    for cls in type(thing).__mro__ if is_users(type(thing)) else ():
        for name, method in vars(cls).items():
            if isinstance(method, types.FunctionType) and is_users(method) and name not in _NOT_OF_A_FORWARD:
                yield from [types.MethodType(method, thing)] if name.startswith("__") else []


def inner_function(method):
    function = getattr(method, "__func__", getattr(method, "func", method))
    return getattr(function, "__wrapped__", function)


def _of(*things):
    """Objects by identity, with those that containers hold."""
    found, waiting = {}, list(things)
    while waiting:
        thing = waiting.pop()
        key = (id(thing.__func__), id(thing.__self__)) if isinstance(thing, types.MethodType) else id(thing)
        if key not in found and not isinstance(thing, LEAVES):
            found[key] = thing
            if isinstance(thing, (dict, nn.CellDict)):
                waiting.extend(thing.values())
            elif isinstance(thing, (*SEQUENCES, nn.CellList, nn.SequentialCell)):
                waiting.extend(thing)
    return found


def _union(*many):
    return {key: thing for values in many for key, thing in values.items()}


def _tensors(values):
    return {key: thing for key, thing in values.items() if isinstance(thing, Tensor)}


def _but(values, *classes):
    return {key: thing for key, thing in values.items() if not isinstance(thing, classes)}


def _elements(values, *but):
    """What iterating or indexing may give."""
    return _but(values, *_CONTAINERS, *but)


def _containers(values):
    return any(isinstance(each, _CONTAINERS) for each in values.values())


def _called(values):
    return {key: thing for key, thing in values.items() if callable(thing) or isinstance(thing, (_Function, _Partial))}


def _functions(values):
    kinds = (_Function, _Partial, types.FunctionType, types.MethodType, functools.partial, ops.MultitypeFuncGraph)
    return {key: thing for key, thing in values.items() if isinstance(thing, kinds)}
