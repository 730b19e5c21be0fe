"""The table of a run, a CSV file. Each step is a NamedTuple of ints, floats and bools that begins with its number."""

import csv
import typing

from common.output import replacing


def write_steps(path, step_type, steps):
    """Writes one row for each step."""
    with replacing(path) as part, open(part, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(step_type._fields)
        # Nine digits are enough to distinguish any two float32 values.
        writer.writerows([f"{value:.9g}" for value in step] for step in steps)


def read_steps(path, step_type, count):
    """Reads the first `count` steps of a file of `write_steps`. Raises a ValueError if they are not there."""
    types = [_flag if its is bool else its for its in typing.get_type_hints(step_type).values()]
    with open(path, newline="") as file:
        rows = list(csv.reader(file))[1 : count + 1]
    if [row[:1] for row in rows] != [[str(number)] for number in range(1, count + 1)]:
        raise ValueError(f"it does not hold the steps 1 to {count}")
    if any(len(row) != len(types) for row in rows):
        raise ValueError(f"it does not have the columns {', '.join(step_type._fields)}")
    return [step_type(*(convert(text) for convert, text in zip(types, row))) for row in rows]


def _flag(text):
    return bool(int(text))
