"""Mutates the reference of the training cells, and shows which mutants no configuration of tests/cells notices.

What the package does in each configuration is recorded once, and each mutant of reference.py is compared with that."""

import argparse
import ast
import copy
import dataclasses
import importlib
import multiprocessing
import pickle
import signal
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from support.equivalent_mutants import EQUIVALENT  # noqa: E402

REFERENCE, SOURCE = "support.reference", TESTS / "support" / "reference.py"
# Modules that take names from it.
_ITS_USERS = ("support.configurations", "support.configured_reference")
_SHARE_TO_NOTICE = 0.95
_SECONDS = 5  # Of a processor, for a record: a mutant may not end.
_OTHERS = {
    **{ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.Pow: [ast.Mult]},
    **{ast.Mod: [ast.Mult], ast.BitOr: [ast.BitAnd], ast.And: [ast.Or], ast.Or: [ast.And]},
    **{ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt]},
    **{ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is]},
}
_OTHER_NAMES = {"max": "min", "min": "max", "any": "all", "all": "any"}
# Calls that may give way to what they are given.
_COPIES = ("list", "dict", "deepcopy", "copy", "max", "min", "clip")


def variants(node):  # Yields what may stand in the place of a node.
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        yield from (_changed(node, op=other()) for other in _OTHERS[type(node.op)])
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield _changed(node, values=rest) if len(rest) > 1 else rest[0]
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _OTHERS[type(op)]:
                yield _changed(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Name) and node.id in _OTHER_NAMES:
        yield _changed(node, id=_OTHER_NAMES[node.id])
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _COPIES:
        yield from node.args
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield _changed(node, ifs=[])
    elif isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, ast.Compare):
        yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Break)) and not is_docstring:
        yield ast.Pass()


def _changed(node, **fields):
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def mutants(source):
    """Yields the name of each mutant, and its code. A name says where it is, what was there, and what is."""
    tree, names = ast.parse(source), {}
    for parent, field, i, node, place in list(_places(tree, ())):
        for variant in variants(node):
            before, after = map(_text, (node, variant))
            name = f"{': '.join(place)}: {before} → {after}"
            names[name] = names.get(name, 0) + 1
            _put(parent, field, i, variant)
            code = compile(ast.fix_missing_locations(tree), "a mutant of reference.py", "exec")
            _put(parent, field, i, node)
            yield name if names[name] == 1 else f"{name} ({names[name]})", code


def _text(node):
    return ast.unparse(node).split("\n")[0]


def _places(node, place):
    """Yields each node with its parent, field and number in it, and the function and the statement that it is in."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        place = (".".join([*place[:1], node.name]),)
    elif isinstance(node, ast.stmt):
        place = (*place[:1], _text(node))
    for field, value in ast.iter_fields(node):
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield node, field, i, child, place[:1] if isinstance(child, ast.stmt) else place
                yield from _places(child, place)


def _put(parent, field, i, node):
    if i is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[i] = node


def who_notices(code, records):  # The number of the first record that differs from what this reference does, or None.
    module, number = types.ModuleType(REFERENCE), 0
    with mock.patch.dict(sys.modules, {REFERENCE: module}):
        for name in _ITS_USERS:
            sys.modules.pop(name, None)
        signal.signal(signal.SIGVTALRM, _stop)
        try:
            exec(code, vars(module))
            replay = importlib.import_module(_ITS_USERS[-1]).replay
            while number < len(records):
                signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
                replay(*records[number])
                number += 1
        except Exception:  # An error shows it, too, and so does _TooLong.
            return number
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


class _TooLong(Exception):
    pass


def _stop(*_):
    raise _TooLong


def record(path):  # Writes what the package does in each configuration.
    from conftest import MODES

    from support.configurations import covering, planted
    from support.configured_training import check
    from support.in_mode import in_mode

    records, configurations = [], [*planted(), *covering()]
    for i, (mode, configuration) in enumerate(configurations):
        with in_mode(MODES[mode]):
            # Whether it resumes is nothing that the reference knows.
            records.append(check(dataclasses.replace(configuration, resume=None, resume_at=len(configuration.calls))))
        print(f"recorded {i + 1} of {len(configurations)}", flush=True)
    path.write_bytes(pickle.dumps(records))


def _start(path):
    global _records, _codes
    np.seterr(all="ignore")
    _records, _codes = pickle.loads(path.read_bytes()), dict(mutants(SOURCE.read_text()))


def _run(name):
    return name, who_notices(_codes[name], _records)


def main():
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many at a time (default: %(default)s)")
    args = parser.parse_args()
    names = [name for name, _ in mutants(SOURCE.read_text())]
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.pickle"
        record(records)
        with multiprocessing.get_context("spawn").Pool(args.jobs, _start, [records]) as pool:
            noticed_by = {}
            for name, number in pool.imap_unordered(_run, names):
                noticed_by[name] = number
                print(f"\r{len(noticed_by)} of {len(names)}", end="", flush=True)
    equivalent = {name: reason for reason, its in EQUIVALENT.items() for name in its}
    lived = [name for name in names if noticed_by[name] is None]
    unknown = [name for name in lived if name not in equivalent]
    share = 1 - len(unknown) / (len(names) - len(lived) + len(unknown))
    print(*(f"\nlived: {name}" for name in unknown), sep="")
    print(f"{len(names)} mutants: {len(lived) - len(unknown)} are equivalent; of the others, {share:.1%} are noticed.")
    wrong = [name for name in equivalent if name not in lived]
    print(*(f"not equivalent, or no mutant: {name}\n" for name in wrong), sep="", end="")
    return int(share < _SHARE_TO_NOTICE or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
