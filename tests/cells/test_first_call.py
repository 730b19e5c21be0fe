"""What compiling a step grows with."""

import pytest
from support.python_process import ROOT, check_python


@pytest.mark.slow
def test_retries_compile_less_than_twice_the_nodes(tmp_path):
    """The networks are in the graph twice, but nothing walks over their gradients one by one."""
    printed = check_python(
        ROOT / "benchmarks" / "first_call.py", "--nodes", "resnet18_retries", cwd=tmp_path, timeout=1800
    )
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in printed.splitlines())
    without, retried = (int(row[header.index("nodes after type_inference")]) for row in rows)
    assert 0 < without < retried < 2 * without
