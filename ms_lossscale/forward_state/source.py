"""Parses the source of functions, and finds what MindSpore's primitives declare in theirs."""

import ast
import builtins
import functools
import importlib.util
import inspect
import re
import sys
import textwrap
import warnings


@functools.lru_cache(maxsize=4096)
def tree_of(code):
    """Returns the AST node of the function or lambda with this code object, None if its source can't be read."""
    try:
        lines, first = inspect.getsourcelines(code)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warned when it compiled the user's code.
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


@functools.cache
def declares_writing(cls):
    """
    Returns whether a class of MindSpore's primitives declares that it writes to an input.

    The declaration is read from the source, since Python can't read it from a signature.
    """
    for base in cls.__mro__:
        if "__mindspore_signature__" in vars(base):
            text = inspect.getsource(sys.modules[base.__module__])
            body = re.search(rf"^class {base.__name__}\(.*?(?=^class |\Z)", text, re.DOTALL | re.MULTILINE)
            return body is not None and "RW_WRITE" in body.group()
    return False


def parameter_names(node):
    """Returns the names of a function's parameters, in their order."""
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def expressions_in(node):
    return [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]


def assignments(node):
    """Yields a target, what is assigned to it, and whether that is iterated over, as in a loop, for each assignment."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem)):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None) or node.optional_vars]
        value = next(getattr(node, name) for name in ("value", "iter", "context_expr") if hasattr(node, name))
        for target in targets:
            if target is not None and value is not None:
                yield from _by_parts(target, value, hasattr(node, "iter"))


def _by_parts(target, value, iterates):
    """Yields the assignment element by element if the value is a tuple or a `zip`."""
    is_zip = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "zip"
    parts = value.args if is_zip else getattr(value, "elts", ())
    if len(getattr(target, "elts", ())) == len(parts) > 0 and not any(isinstance(n, ast.Starred) for n in parts):
        for each, part in zip(target.elts, parts):
            yield from _by_parts(each, part, is_zip)
    else:
        yield target, value, iterates


def imported(node, package):
    """Yields the names that an import binds, and the objects. It imports nothing: that would run a module's code."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or name, sys.modules.get(name)
        else:
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            held = vars(sys.modules[module]) if module in sys.modules else {}
            yield alias.asname or alias.name, held.get(alias.name, sys.modules.get(f"{module}.{alias.name}"))


def outside(function, name):
    """Returns what a name stands for that a function does not assign, None if there is no such object yet."""
    code = function.__code__
    if name in code.co_freevars and function.__closure__:
        return function.__closure__[code.co_freevars.index(name)].cell_contents
    return function.__globals__.get(name, getattr(builtins, name, None))


def names_that_may_be(node, owners):
    """Returns the owners' attribute names that contain all string constants of an expression."""
    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    parts = [part for text in texts for part in re.split(r"%\w|\{.*?\}", text)]
    held = [vars(owner) for owner in owners.values() if hasattr(owner, "__dict__")]
    held += [each[name] for each in held for name in ("_params", "_buffers", "_cells") if each.get(name)]
    return {name for each in held for name in each if all(part in name for part in parts)}
