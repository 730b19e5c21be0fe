"""The syntax tree of a function."""

import ast
import functools
import inspect
import textwrap
import types
import warnings


def unwrapped(function):
    """The plain function within decorators and bound methods, and what it is bound to, or None."""
    owner = None
    while True:
        if isinstance(function, types.MethodType):
            function, owner = function.__func__, function.__self__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function, owner


@functools.lru_cache(maxsize=4096)
def tree_of(code):
    """The node of the function or lambda with this code object; None where its source can't be read."""
    try:
        lines, first = inspect.getsourcelines(code)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warned of a user's literals when it compiled them.
            tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = [node for node in ast.walk(tree) if _is_of(node, code.co_name, code.co_firstlineno - first + 1)]
    return found[0] if len(found) == 1 else None


def _is_of(node, name, line):
    if isinstance(node, ast.Lambda):
        return name == "<lambda>" and node.lineno == line
    if isinstance(node, ast.FunctionDef):
        return node.name == name and min(n.lineno for n in (node, *node.decorator_list)) == line
    return False
