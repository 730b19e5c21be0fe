"""The source of functions, and what MindSpore's primitives declare in theirs."""

import ast
import functools
import importlib.util
import inspect
import re
import sys
import textwrap
import warnings


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


@functools.cache
def declares_writing(cls):
    """
    Whether a class of MindSpore's primitives declares that it writes an input.

    A signature keeps nothing that Python can read once it was declared, so its declaration is read.
    """
    for base in cls.__mro__:
        if "__mindspore_signature__" in vars(base):
            text = inspect.getsource(sys.modules[base.__module__])
            body = re.search(rf"^class {base.__name__}\(.*?(?=^class |\Z)", text, re.DOTALL | re.MULTILINE)
            return body is not None and "RW_WRITE" in body.group()
    return False


def parameter_names(node):
    """The names of a function's parameters, in their order."""
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def imported_by(node, package):
    """Pairs of a name and what an import statement gives it. Modules that were not imported before hold nothing."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or name, sys.modules.get(name)
        return
    module = sys.modules.get(importlib.util.resolve_name("." * node.level + (node.module or ""), package))
    for alias in node.names:
        yield alias.asname or alias.name, getattr(module, alias.name, None)
