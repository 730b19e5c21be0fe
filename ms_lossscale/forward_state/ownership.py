"""Tells whose a class, a function or a module is: the user's, or of a package that knows nothing of MindSpore."""

import functools
import sys
import sysconfig
import types
import weakref

from mindspore import nn

from ms_lossscale.forward_state.static import class_dict, instance_dict, is_a, mro

_CODE_OF_OTHERS = ("mindspore", "ms_lossscale", "_c_expression", "pybind11_builtins", "numpy")
_SHOWN_BY_A_CLASS = ("__getattribute__", "__getattr__", "__dict__", "__mro__", "__eq__", "__hash__")
_MODULE = type.__dict__["__module__"]


def is_users(thing):
    """
    Returns whether a class, function or module is the user's: of a package that knows MindSpore, or that is not
    installed, but not MindSpore's, ours, NumPy's or Python's.
    """
    return _is_users(module_of(thing))


@functools.lru_cache(maxsize=4096)
def users_classes(cls):
    """Returns those of a class and its bases that are the user's."""
    return [base for base in mro(cls) if is_users(base)]


def is_foreign(thing):
    """Returns whether a class, function or module is of an installed package that does not know MindSpore."""
    return not is_users(thing) and not is_platforms(thing)


def is_platforms(thing):
    """Returns whether a class, function or module is MindSpore's, ours, NumPy's or Python's."""
    return not is_users(thing) and _is_of_others(module_of(thing).partition(".")[0])


def is_ours(thing):
    """Returns whether a class, function or module is this package's, other than the self-check's networks."""
    return module_of(thing).startswith("ms_lossscale.") and not is_users(thing)


@functools.lru_cache(maxsize=4096)
def is_disguised(cls):
    """
    Returns whether code of others would run if one of its objects, other than a Cell, were asked for its class, or if
    the class itself were looked at.
    """
    if cls in weakref.ProxyTypes:
        return True
    of_object = {name for base in mro(cls) if not is_platforms(base) for name in class_dict(base)}
    of_class = {name for base in mro(type(cls)) if not is_platforms(base) for name in class_dict(base)}
    hides = not of_object.isdisjoint(("__class__", "__getattribute__")) and not is_a(cls, nn.Cell)
    return hides or not of_class.isdisjoint(_SHOWN_BY_A_CLASS)


def is_users_namespace(namespace):
    """Returns whether a dict of globals is of a module of the user's."""
    return _is_users(str(namespace["__name__"]))


def module_of(thing):
    """Returns the name of the module of a class, function or module, empty if it has none."""
    kind = type(thing)
    if issubclass(kind, types.ModuleType):
        module = vars(thing).get("__name__")
    elif kind is types.FunctionType:
        # The module of its code: `functools.wraps` gives a wrapper the module name of the function inside.
        module = thing.__globals__.get("__name__")
    elif kind is types.MethodType:
        return module_of(thing.__func__)
    elif issubclass(kind, type):
        # Not by the attribute: a metaclass may compute it, or have its own in its place, as those of Cython 3.3 do.
        module = _MODULE.__get__(thing)
    elif kind is types.BuiltinFunctionType:
        module = thing.__module__
    else:
        # The result of `functools.lru_cache` has one of its own.
        module = instance_dict(thing).get("__module__") or _MODULE.__get__(kind)
    return module if isinstance(module, str) else ""


def forget_imports():
    """Lets the packages be looked at again: an import may have told one of MindSpore."""
    for function in (users_classes, is_disguised, _is_users, _is_of_others, _modules_of_packages, _packages_known_to):
        function.cache_clear()


@functools.cache
def _is_users(module):
    package = module.partition(".")[0]
    # The self-check's networks stand for a user's.
    return module.startswith("ms_lossscale.selfcheck.") or (
        not _is_of_others(package) and (not _is_installed(package) or _knows_mindspore(package))
    )


@functools.cache
def _is_of_others(package):
    path = _path_of(package)
    is_pythons = path.startswith(sysconfig.get_paths()["stdlib"]) and not _is_installed(package)
    return is_pythons or package in (*_CODE_OF_OTHERS, *sys.builtin_module_names)


def _is_installed(package):
    return any(each in _path_of(package) for each in ("site-packages", "dist-packages"))


def _path_of(package):
    """Returns the path of a package's file, or of its folder if it has no `__init__.py`; empty if it has neither."""
    module = sys.modules.get(package)
    its = vars(module) if issubclass(type(module), types.ModuleType) else {}
    return its.get("__file__") or next(iter(its.get("__path__", ())), "")


def _knows_mindspore(package):
    """Returns whether a module of the package has something of MindSpore's, or of a package that knows it."""
    seen, waiting = set(), [package]
    while waiting:
        each = waiting.pop()
        if each == "mindspore":
            return True
        if each not in seen and not _is_of_others(each):
            seen.add(each)
            waiting.extend(_packages_known_to(each))
    return False


@functools.cache
def _packages_known_to(package):
    values = (value for module in _modules_of_packages().get(package, ()) for value in list(vars(module).values()))
    kinds = (types.ModuleType, types.FunctionType, type)
    return {module_of(value).partition(".")[0] for value in values if issubclass(type(value), kinds)}


@functools.cache
def _modules_of_packages():
    found = {}
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType):
            found.setdefault(name.partition(".")[0], []).append(module)
    return found
