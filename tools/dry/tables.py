"""Tables in GitHub's Markdown, on stdout and in a file."""

import shlex
import sys
from pathlib import Path

from dry.processes import ROOT


def command():
    """Returns the command of this process, as one would type it in the checkout."""
    script = Path(sys.argv[0]).resolve()
    return shlex.join(["python", str(script.relative_to(ROOT)), *sys.argv[1:]])


def table(header, rows, left=1):
    """Returns a table whose first columns are aligned left, and the others right."""
    lines = [header, [":--"] * left + ["--:"] * (len(header) - left), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def of_cycle(first, last):
    """Returns the numbers of a cycle's first and last call as text."""
    return str(last) if first == last else f"{first} to {last}"


def show(text, output=None):
    """Prints a table, and adds it to a file, below the command that made it."""
    print(text, flush=True)
    if output is not None:
        with open(output, "a") as file:
            file.write(f"\n`{command()}`:\n\n{text}")
