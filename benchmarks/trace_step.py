"""
Follows one step through the package, as a reader of the code would, and counts files, classes and functions.

The step runs in PyNative mode with an optimizer that is not MindSpore's. Then nothing is compiled, and Python sees
every call. A method counts for the class that defines it. A second table has the size of the package.
"""

import argparse
import ast
import io
import sys
import tokenize
from functools import cache
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import ms_lossscale
from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

PACKAGE = str(Path(ms_lossscale.__file__).parent)
STEPS = {
    "plain": {},
    "clipped, averaged, retried": {"clip_norm": 1.0, "ema_decay": 0.99, "max_retries": 1},
}


class Descent(nn.Cell):
    """The simplest optimizer that is not MindSpore's."""

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        self.parameters = parameters
        self._rate = Tensor(0.1, mindspore.float32)

    def construct(self, grads):
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, grad * self._rate)


class Trace:
    """
    Records the functions of the package that are called, for `sys.setprofile`.

    Attributes:
        functions (dict): Keys are (file, class, function), in the order of the first calls.
        depth (int): How deep the calls go.
    """

    def __init__(self):
        self.functions, self.depth = {}, 0
        self._present_depth = 0

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            self._present_depth += 1
            self.depth = max(self.depth, self._present_depth)
            owner = class_at(code.co_filename, code.co_firstlineno)
            self.functions[str(Path(code.co_filename).relative_to(PACKAGE)), owner, code.co_name] = None
        elif event == "return":
            self._present_depth -= 1

    def counts(self):
        """Returns the numbers of files, classes and functions, and the depth."""
        files = {file for file, _, _ in self.functions}
        classes = {(file, owner) for file, owner, _ in self.functions if owner}
        return len(files), len(classes), len(self.functions), self.depth


@cache
def parsed(path):
    """Returns the syntax tree of a file."""
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def classes_in(path):
    """Returns the nodes of the classes of a file, those within others included."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]


def class_at(path, line):
    """Returns the name of the innermost class that has this line, or an empty string."""
    around = [node for node in classes_in(path) if node.lineno <= line <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name if around else ""


def functions_in(path):
    """Yields (lines, name) of each function of a file: from its first decorator to its end, without its docstring."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min(each.lineno for each in (node, *node.decorator_list))
            yield node.end_lineno - first + 1 - len(_docstring_lines(node)), node.name


def code_lines(path):
    """Returns how many lines of a file are code: no docstring, comment or blank line."""
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(Path(path).read_text(encoding="utf-8")).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(path)):
        lines -= _docstring_lines(node)
    return len(lines)


def _docstring_lines(node):
    documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    if not documented or ast.get_docstring(node, clean=False) is None:
        return set()
    return set(range(node.body[0].lineno, node.body[0].end_lineno + 1))


def sizes(package):
    """Returns rows (what, how many, where) on the files of a package."""
    files = sorted(Path(package).rglob("*.py"))
    longest = max(((*function, file) for file in files for function in functions_in(file)), key=lambda each: each[0])
    length, file = max((len(file.read_text(encoding="utf-8").splitlines()), file) for file in files)
    step = [file for file in files if file.parent == Path(package) / "step"]
    return [
        ("lines of code", sum(map(code_lines, files)), f"{len(files)} files"),
        ("classes", sum(len(classes_in(file)) for file in step), "step/"),
        ("lines of the longest function", longest[0], f"{longest[2].relative_to(package).as_posix()}: {longest[1]}"),
        ("lines of the longest file", length, file.relative_to(package).as_posix()),
    ]


def trace_step(**keywords):
    """Traces the third step of a ScaledTrainOneStepCell with a dynamic scale, in PyNative mode."""
    network = nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss())
    optimizer = Descent(mindspore.ParameterTuple(network.trainable_params()))
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()
    inputs = [Tensor(np.ones(shape, np.float32)) for shape in ((2, 4), (2, 1))]
    for _ in range(2):
        cell(*inputs)
    trace = Trace()
    sys.setprofile(trace)
    try:
        cell(*inputs)
    finally:
        sys.setprofile(None)
    return trace


def main(arguments=None):
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Follow one step through the package, and count its functions.")
    parser.add_argument("--list", action="store_true", help="list the functions of the plain step in order")
    args = parser.parse_args(arguments)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    traces = {name: trace_step(**keywords) for name, keywords in STEPS.items()}
    print("| step | files | classes | functions | calls deep |")
    print("|---|---:|---:|---:|---:|")
    for name, trace in traces.items():
        print(f"| {name} | {' | '.join(map(str, trace.counts()))} |")
    if args.list:
        for file, owner, function in traces["plain"].functions:
            print(f"{file}: {f'{owner}.' if owner else ''}{function}")
    print("\n| package | number | where |\n|---|---:|---|")
    for row in sizes(PACKAGE):
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
