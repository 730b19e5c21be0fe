"""Looks at objects as Python stores them, whatever code of their class or metaclass would show instead."""

import threading
import types

_DICT, _MRO = type.__dict__["__dict__"], type.__dict__["__mro__"]


def class_dict(cls):
    """Returns the attributes of a class itself."""
    return _DICT.__get__(cls) or {}


def mro(cls):
    """Returns a class and its bases."""
    # Some classes of Python 3.9 are never completed, and have neither bases nor attributes.
    return _MRO.__get__(cls) or (cls,)


def instance_dict(thing):
    """Returns an object's attributes that are kept in a dict."""
    if issubclass(type(thing), threading.local):
        return threading.local.__getattribute__(thing, "__dict__")
    for cls in mro(type(thing)):
        descriptor = class_dict(cls).get("__dict__")
        # Something else may be a property of the user's.
        if isinstance(descriptor, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return descriptor.__get__(thing)
    return {}


def class_attribute(cls, name, default=None):
    """Returns what a class or one of its bases has under a name, unbound."""
    for base in mro(cls):
        its = class_dict(base)
        if name in its:
            return its[name]
    return default


def attribute(thing, name, default=None):
    """Returns what an object or its class has under a name, unbound; for a class, what it or its metaclass has."""
    kind = type(thing)
    in_class = class_attribute(kind, name, default)
    if issubclass(kind, type):
        return class_attribute(thing, name, in_class)
    its = instance_dict(thing)
    # What can be set, such as a property, comes before the object's own.
    is_first = in_class is not default and class_attribute(type(in_class), "__set__") is not None
    return its[name] if name in its and not is_first else in_class


def is_a(thing, cls):
    """Returns whether an object is of a class, or a class is derived from it."""
    own = mro(thing) if issubclass(type(thing), type) else ()
    return any(base is cls for base in (*own, *mro(type(thing))))
