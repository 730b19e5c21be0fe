"""
What Python objects hold. A class may answer with code of the user's for an attribute, an item or a class: none of it
runs while a cell is built.
"""

import contextlib
import types


def is_a(thing, *classes):
    """Returns whether the object is of one of these classes, whatever it says of itself."""
    return issubclass(type(thing), classes)


def items_of(thing):
    """Returns pairs of a key, or a position, and an item of a list, a tuple or a dict; none of other objects."""
    if is_a(thing, list):
        return list(enumerate(list.__iter__(thing)))
    if is_a(thing, tuple):
        return list(enumerate(tuple.__iter__(thing)))
    return list(dict.items(thing)) if is_a(thing, dict) else []


def attributes_of(thing):
    """Returns pairs of a name and an attribute of an object, those in its slots included."""
    attributes = []
    for its_class in type(thing).__mro__:
        for name, descriptor in vars(its_class).items():
            # That of a types.SimpleNamespace is a member.
            if name == "__dict__" and type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):
                attributes += dict.items(descriptor.__get__(thing))
            elif "__slots__" in vars(its_class) and type(descriptor) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # It has no value yet.
                    attributes.append((name, descriptor.__get__(thing)))
    return attributes
