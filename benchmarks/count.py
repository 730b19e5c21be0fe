"""
Counts the package: lines of code without docstrings, comments and blank lines, classes and files, by folder, and all
lines of the tests. Then, unless it counts another revision, follows one plain step: the files, classes and functions of
the package that Python calls.

    python benchmarks/count.py [REVISION OF GIT]
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from pathlib import Path, PurePath

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
ROOT = Path(__file__).resolve().parents[1]


def sources(revision):
    """Yields the path and text of each file of the package and the tests, in the working folder or in a revision."""
    if revision is None:
        paths = [*(ROOT / "ms_lossscale").rglob("*.*"), *(ROOT / "tests").rglob("*.*")]
        files = [(path.relative_to(ROOT).as_posix(), path.read_bytes()) for path in paths if path.is_file()]
    else:
        command = ["git", "archive", revision, "ms_lossscale", "tests"]
        packed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            files = [(member.name, archive.extractfile(member).read()) for member in archive if member.isfile()]
    for path, content in files:
        if path.endswith((".py", ".txt", ".js")):
            yield PurePath(path), content.decode("utf-8", "replace")


def count(text):
    """Returns the lines of code and the classes of a file."""
    lines, classes = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        classes += isinstance(node, ast.ClassDef)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return Counter({"lines of code": len(lines), "classes": classes, "files": 1})


def calls_of_a_step():
    """Returns (file, line) of each function that the third step of a cell calls, in PyNative mode."""
    import mindspore
    import numpy as np
    from mindspore import Tensor, nn, ops

    from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

    class Descent(nn.Cell):
        """An optimizer that is not MindSpore's: then nothing is compiled, and Python sees every call."""

        def __init__(self, parameters):
            super().__init__(auto_prefix=False)
            self.parameters = parameters

        def construct(self, grads):
            for parameter, grad in zip(self.parameters, grads):
                ops.assign_sub(parameter, grad * 0.1)

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    network = nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss())
    optimizer = Descent(mindspore.ParameterTuple(network.trainable_params()))
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10)).set_train()
    inputs = [Tensor(np.ones((2, width), np.float32)) for width in (4, 1)]
    called = {}
    for step in range(3):
        if step == 2:
            sys.setprofile(lambda frame, event, _: called.setdefault(frame.f_code) if event == "call" else None)
        cell(*inputs)
    sys.setprofile(None)
    package = ROOT / "ms_lossscale"
    return {
        (code.co_filename, code.co_firstlineno) for code in called if Path(code.co_filename).is_relative_to(package)
    }


def class_at(path, line):
    """Returns the line of the innermost class that has this line, 0 if there is none."""
    nodes = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.ClassDef)]
    return max((node.lineno for node in nodes if node.lineno <= line <= node.end_lineno), default=0)


def main(revision=None):
    totals, tests = {"ms_lossscale": Counter()}, 0
    for path, text in sources(revision):
        if path.parts[0] == "tests":
            tests += text.count("\n")
        elif path.suffix == ".py":
            for name in ("ms_lossscale", path.parts[1] if len(path.parts) > 2 else "(top level)"):
                totals.setdefault(name, Counter()).update(count(text))
    print("| | lines of code | classes | files |\n|---|---:|---:|---:|")
    for name, total in sorted(totals.items(), key=lambda item: -item[1]["lines of code"]):
        print(f"| {name} | {' | '.join(map(str, total.values()))} |")
    print(f"| tests, all lines | {tests} | | |")
    if revision is None:
        sys.path.insert(0, str(ROOT))
        called = calls_of_a_step()
        files = {path for path, _ in called}
        classes = {(path, class_at(path, line)) for path, line in called if class_at(path, line)}
        print(f"\nA plain step calls {len(called)} functions of {len(classes)} classes in {len(files)} files.")


if __name__ == "__main__":
    main(*sys.argv[1:])
