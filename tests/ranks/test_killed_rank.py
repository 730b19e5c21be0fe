"""A rank that dies must not leave the others waiting. In a file of its own, since it is all waiting."""

import pytest
from support.python_process import run_msrun
from support.ranks_program import SCRIPT


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_a_message(tmp_path):
    # The time after which MindSpore takes a silent rank for dead: 30 s otherwise.
    job = run_msrun(2, SCRIPT, tmp_path, "killed/graph", cwd=tmp_path, timeout=120, MS_NODE_TIMEOUT="10")
    assert job.returncode != 0
    assert "Distributed job exited with exception" in job.output
    assert "Error code: -9" in job.output
