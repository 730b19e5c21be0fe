"""What a call may write, and what it may return."""

import ast
import collections
import functools
import re
import types

from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import Primitive

from ms_lossscale.forward_state.reachable import OPTIMIZERS, is_users
from ms_lossscale.forward_state.source import declares_writing, parameter_names, tree_of
from ms_lossscale.forward_state.values import Bound, Frame, elements, of, union

# Methods of tensors that write them, and MindSpore's functions and primitives that write their first argument.
_WRITES = re.compile(r"(?!_).*[^_]_|set_data|(?i:assign)\w*|itemset|scatter_(?!nd$)\w+|index_add")
# Those whose result may be what they are given; gradients and maps give functions, which are called later.
SHARES = re.compile(
    r"(?i)depend|load|stop_?gradient|identity|value|data|cast|astype|to|float|view|view_?as|reshape|transpose|permute"
    r"|m?t|flatten|ravel|squeeze|unsqueeze|expand_?dims|expand_?as|narrow|select|split|chunk|unbind|swapaxes|diagonal"
    r"|detach|assign\w*|\w*grad\w*|hypermap|map|vmap|jit|vjp|jvp"
)
# Methods of MindSpore's cells that give what they hold.
_QUERIES = re.compile(r"\w*(params|parameters|parameters_dict|buffers|cells|parameters_and_names|cells_and_names)")
_METHODS_OF_CONTAINERS = ("items", "values", "get", "pop", "popleft", "copy", "append", "setdefault", "__getitem__")
# Far more than any network needs. What reaches them counts as undecided.
_MOST_CALLS, _DEEPEST_CALL = 20_000, 60
# More arguments than functions have, where it is not known which is which.
MANY = 8


class CannotFollow(Exception):
    """Source of a kind that is not followed."""


class Calls:
    """
    The part of :class:`~ms_lossscale.forward_state.may_write.Reading` that reads calls.

    Attributes:
        made (dict): What the source makes; it must stay what it is for as long as its identity counts.
        returned (dict): What each call that was read may return.
    """

    def __init__(self):
        self.made, self.returned, self._depth = {}, {}, 0

    def read_call(self, function, args):
        """A call from outside of all that is read."""
        self._depth = 0
        self._call_one(function, args, {})

    def _Call(self, node, frame):
        args = [self.evaluate(each, frame) for each in node.args]
        kwargs = {each.arg: self.evaluate(each.value, frame) for each in node.keywords}
        if None in kwargs or any(isinstance(each, ast.Starred) for each in node.args):
            given = union(*args, *kwargs.values())
            args, kwargs = [union(given, elements(given))] * MANY, {}
        if isinstance(node.func, ast.Attribute):
            return self._call_method(node.func, args, kwargs, frame)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return self._super(args, frame)
        functions = self.evaluate(node.func, frame)
        if not any(map(_is_called, functions.values())):
            self.doubt(
                union(*args, *kwargs.values()), f"it is passed to '{ast.unparse(node.func)}', which is not known"
            )
        return self._apply(functions, args, kwargs)

    def _super(self, args, frame):
        classes, owners = (
            args if args else (frame.read("__class__"), frame.read(*frame.function.__code__.co_varnames[:1]))
        )
        parents = {}
        for cls in classes.values():
            for owner in owners.values():
                if isinstance(owner, cls):
                    parents.update(of(self.made.setdefault((id(cls), id(owner)), super(cls, owner))))
        return parents

    def _call_method(self, func, args, kwargs, frame):
        receivers, name, given, result = (
            self.evaluate(func.value, frame),
            func.attr,
            union(*args, *kwargs.values()),
            {},
        )
        for thing in receivers.values():
            if isinstance(thing, (Tensor, str, list, tuple, set, dict, collections.deque)):
                if isinstance(thing, Tensor) and name not in _METHODS_OF_CONTAINERS:
                    self.write(of(thing) if _WRITES.fullmatch(name) else {})
                    result.update(of(thing) if _WRITES.fullmatch(name) or SHARES.fullmatch(name) else {})
                    continue
                self.grow(func.value, given, frame)
                held = elements(of(thing))
                result.update(self.row(self.row({}, held)) if name == "items" else union(given, held))
                continue
            functions = self.attribute(of(thing), name)
            if not functions and _WRITES.fullmatch(name):
                self.write(of(thing))
            elif not functions:
                self.doubt(given, f"it is passed to '{ast.unparse(func)}', which is not known")
            result.update(self._apply(functions, args, kwargs))
        return result

    def _apply(self, functions, args, kwargs):
        return union(
            *(self._call_one(function, args, kwargs) for function in functions.values() if _is_called(function))
        )

    def _call_one(self, function, args, kwargs):
        """What a call may return. A second one with the same arguments writes nothing new."""
        while args and not args[-1]:
            args = args[:-1]
        key = (id(function), *map(frozenset, args), *((name, frozenset(values)) for name, values in kwargs.items()))
        if key not in self.returned:
            # What is kept has its identity for as long as it counts.
            self.made[key] = (function, args, kwargs)
            self.returned[key] = {}
            self.returned[key] = self._call_anew(function, args, kwargs)
        return self.returned[key]

    def _call_anew(self, function, args, kwargs):
        if isinstance(function, types.MethodType):
            return self._call_one(function.__func__, [of(function.__self__), *args], kwargs)
        if isinstance(function, functools.partial):
            return self._call_one(function.func, [*map(of, function.args), *args], kwargs)
        if isinstance(function, Bound):
            is_local = isinstance(function.function, ast.AST)
            return (
                self._enter(function, args, kwargs)
                if is_local
                else self._call_one(function.function, [*function.args, *args], kwargs)
            )
        if isinstance(function, OPTIMIZERS):
            self.write(of(function))
            return {}
        if isinstance(function, types.FunctionType):
            inner = self._call_one(function.__wrapped__, args, kwargs) if hasattr(function, "__wrapped__") else {}
            outer = self._enter if is_users(function) else self._call_of_others
            return union(inner, outer(function, args, kwargs))
        if isinstance(function, nn.Cell) and is_users(inner_function(function.construct)):
            return self._call_one(function.construct, args, kwargs)
        if isinstance(function, type) and is_users(function):
            return self._make(function, union(*args, *kwargs.values()))
        if not is_users(function if hasattr(function, "__module__") else type(function)):
            return self._call_of_others(function, args, kwargs)
        own_call = type(function).__call__
        if isinstance(own_call, types.FunctionType):
            return self._call_one(own_call, [of(function), *args], kwargs)
        self.doubt(union(*args, *kwargs.values()), f"it is passed to {function!r}, which can't be read")
        return {}

    def _make(self, cls, given):
        """An object that the source makes: from then on, all that its class can do to what it was given may be done."""
        for method in vars(cls).values():
            if isinstance(method, types.FunctionType):
                self._call_one(method, [union(given, of(cls))] * len(parameter_names(tree_of(method.__code__))), {})
        return union(given, of(cls))

    def _enter(self, function, args, kwargs):
        node = function.function if isinstance(function, Bound) else tree_of(function.__code__)
        if node is None:
            held = [of(cell.cell_contents) for cell in function.__closure__ or ()]
            why = f"it is passed to '{function.__qualname__}', whose source can't be read"
            self.doubt(union(*args, *kwargs.values(), *held), why)
            return {}
        if self._depth == _DEEPEST_CALL or len(self.returned) > _MOST_CALLS:
            raise CannotFollow("it calls too many functions")
        frame = function.frame if isinstance(function, Bound) else Frame(function)
        self._bind(frame, node, function, args, kwargs)
        self._depth += 1
        if isinstance(node, ast.Lambda):
            returned = self.evaluate(node.body, frame)
        else:
            outer, frame.returned = frame.returned, {}
            self.run(node.body, frame)
            returned, frame.returned = frame.returned, outer
        self._depth -= 1
        return returned

    def _bind(self, frame, node, function, args, kwargs):
        names = parameter_names(node)
        defaults = (
            union(*(self.evaluate(each, frame) for each in node.args.defaults))
            if isinstance(function, Bound)
            else of(*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        )
        for i, name in enumerate(names):
            frame.names[name] = args[i] if i < len(args) else kwargs.get(name, defaults)
        rest = union(*args[len(names) :], *(values for name, values in kwargs.items() if name not in names))
        for more in filter(None, (node.args.vararg, node.args.kwarg)):
            frame.names[more.arg] = rest

    def _call_of_others(self, function, args, kwargs):
        """A function, class or primitive of MindSpore's or Python's."""
        cls = function if isinstance(function, type) else type(function)
        name = getattr(function, "__name__", cls.__name__)
        given = union(*args, *kwargs.values())
        if name == "getattr":
            return self.attributes_named(*args[:2])
        if name == "setattr":
            self.write(self.attributes_named(*args[:2], every=any))
            return {}
        if name in ("zip", "enumerate"):
            return self.row(self.row(*([{}] if name == "enumerate" else []), *map(elements, args)))
        if name.lower() == "partial":
            return of(
                *(self.made.setdefault((id(f), *map(frozenset, args)), Bound(f, args[1:])) for f in args[0].values())
            )
        if name == "Custom":
            self.doubt(given, "it is passed to an ops.Custom")
        elif issubclass(cls, Primitive) and declares_writing(cls):
            self.write(given)
        elif name.startswith("batch_norm"):
            self.write(union(*args[1:3], kwargs.get("running_mean", {}), kwargs.get("running_var", {})))
        elif _WRITES.fullmatch(name) or getattr(function, "__module__", "") == "_operator":
            self.write(union(*(args[:1] or [given])))
        if "max_norm" in kwargs or (name.startswith("embedding") and len(args) > 3):
            self.write(given)
        self._run_within(function, args, kwargs)
        module = getattr(function, "__module__", None) or cls.__module__
        is_pythons = module.partition(".")[0] not in ("mindspore", "_c_expression")
        if is_pythons or SHARES.fullmatch(name):
            return union(given, elements(given), of(function) if isinstance(function, type) else {})
        if _QUERIES.fullmatch(name):
            return args[0]
        return of(function) if isinstance(function, type) else {}

    def _run_within(self, function, args, kwargs):
        """The functions that MindSpore or Python calls with what else it is given."""
        held = vars(function).values() if hasattr(function, "__dict__") and not isinstance(function, type) else ()
        if isinstance(function, ops.MultitypeFuncGraph):
            held = [entry[-1] for entry in function.entries]
        for inner in filter(_is_function, held):
            self._call_one(inner, [elements(values) for values in args], kwargs)
        given = [elements(values) for values in args if not any(map(_is_function, values.values()))]
        name = getattr(function, "__name__", type(function).__name__)
        if re.fullmatch(r"(?i)\w*grad\w*|vjp|jvp", name):
            given = []  # The weights, say, by which it differentiates.
        elif not re.fullmatch(r"(?i)\w*(map|reduce)", name):
            given = [union(*given)] * MANY
        for inner in filter(_is_function, union(*args, *kwargs.values()).values()):
            self._call_one(inner, given, {})
        if isinstance(function, nn.Cell):
            for cell in function.cells():
                self._call_one(cell, args, kwargs)


def _is_function(thing):
    return isinstance(thing, (Bound, types.FunctionType, types.MethodType, functools.partial, ops.MultitypeFuncGraph))


def _is_called(thing):
    return callable(thing) or isinstance(thing, Bound)


def inner_function(method):
    function = getattr(method, "__func__", method)
    return getattr(function, "__wrapped__", function)
