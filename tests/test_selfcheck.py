"""The self-check: its command, and that each of its checks goes red where the package is broken."""

import json
import re

import pytest
from conftest import MODES
from mindspore import ops
from support.mutants import MUTANTS
from support.python_process import check_msrun, run_msrun, run_python, skip_with_older_mindspore

import ms_lossscale
from ms_lossscale.loss_scale import LossScale, ScheduledLossScale
from ms_lossscale.selfcheck.checks import CHECKS
from ms_lossscale.selfcheck.command_line import main

NAMES = [check.name for check in CHECKS]
# The topics of these take long: of a package that is broken they run only where they are to go red.
SLOW = ("loops", "resume", "cost")
BROKEN = [mutant for mutant in MUTANTS if mutant.checks and not mutant.ranks]
BROKEN_FOR_RANKS = [mutant for mutant in MUTANTS if mutant.checks and mutant.ranks]


def run(*arguments, cwd, **variables):
    return run_python("-m", "ms_lossscale.selfcheck", *arguments, cwd=cwd, **variables)


@pytest.mark.long
@pytest.mark.parametrize("emulate", [False, True], ids=["cpu", "emulated"])
def test_all_holds_in_both_modes(emulate, tmp_path):
    result = run("--json", "result.json", *["--emulate"] * emulate, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    written = json.loads((tmp_path / "result.json").read_text())
    assert written.keys() == {"held", "checks", "device", "versions", "environment"}
    assert written["held"] is True
    assert written["versions"]["ms_lossscale"] == ms_lossscale.__version__
    missing = {"has_ranks", "gradients_show_it" if emulate else "has_register"}
    expected = [check.name for check in CHECKS if not missing & set(check.needs)]
    assert [(check["name"], check["mode"]) for check in written["checks"]] == [
        (name, mode) for mode in MODES for name in expected
    ]
    assert all(check["held"] and check["message"] == "" and check["seconds"] >= 0 for check in written["checks"])
    assert sum(check["seconds"] for check in written["checks"]) < 120
    detector = "FloatStatusRegister" if emulate else "FiniteGradients"
    assert f"Overflow detector: {detector}," in result.stdout


@pytest.mark.long
def test_ranks_are_checked_under_msrun(tmp_path):
    check_msrun(2, "python", "-m", "ms_lossscale.selfcheck", "an-overflow-on", "--json", "result.json", cwd=tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert [check["held"] for check in written["checks"]] == [True, True]


@pytest.mark.long
@pytest.mark.parametrize("mutant", BROKEN_FOR_RANKS, ids=lambda mutant: mutant.name)
def test_the_check_of_ranks_can_fail(mutant, tmp_path):
    mutant.copy_package(tmp_path)
    command = ["python", "-m", "ms_lossscale.selfcheck", *mutant.checks, "--mode", "graph"]
    job = run_msrun(2, *command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    for log in job.logs:
        assert "1 of 1 did not hold" in log
        assert "the ranks hold different weights" in log


def test_no_check_is_left_out():
    assert set().union(*(mutant.checks for mutant in MUTANTS)) == set(NAMES)


def test_the_list_names_each_claim(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NAMES) == len(set(NAMES))
    for line, check in zip(lines, CHECKS):
        assert line == f"{check.name}: {check.claim}"
        assert re.fullmatch(r"\S.*[.]", check.claim)


def test_names_are_chosen_by_their_beginnings(capsys):
    assert main(["--list", "an-overflow-in", "hysteresis-waits"]) == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["an-overflow-in-the-forward-is-seen", "an-overflow-in-the-backward-is-seen", "hysteresis-waits"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no-such-check"], "'no-such-check'"),
        pytest.param(["--device", "Nothing"], "Nothing", marks=pytest.mark.long),
        pytest.param(["--device", "Ascend"], "Ascend", marks=pytest.mark.long),
        pytest.param(["--device", "GPU", "--emulate"], "GPU", marks=pytest.mark.long),
        (["reading-the-register"], "reading-the-register-consumes-it"),
        pytest.param(["--mode", "fast"], "fast", marks=pytest.mark.long),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_could_not_run_is_told_apart(arguments, words, tmp_path):
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.name)
def test_each_check_can_fail(mutant, tmp_path):
    skip_with_older_mindspore("what breaks the package does so with any MindSpore")
    mutant.copy_package(tmp_path)
    names = [
        check.name for check in CHECKS if check.name in mutant.checks or check.run.__module__.split(".")[-1] not in SLOW
    ]
    options = ["--device", "CPU", "--mode", "graph", "--json", "result.json", *["--emulate"] * mutant.emulated]
    result = run(*names, *options, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1, result.stderr[-3000:]
    results = json.loads((tmp_path / "result.json").read_text())["checks"]
    assert {result["name"] for result in results if not result["held"]} == mutant.checks
    for result in results:
        if not result["held"]:
            assert result["message"].startswith("On this device (CPU")
            # It says what is wrong, and is no crash.
            assert "Error:" not in result["message"]


def halved(self, loss_scale, overflow):
    return ops.select(overflow, loss_scale * 0.5, loss_scale)


def test_what_does_not_hold_is_reported(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ScheduledLossScale, "next_scale", halved)
    assert main(["fixed", "hysteresis", "--mode", "pynative", "--json", "result.json"]) == 1
    out = capsys.readouterr().out
    assert "NOT HELD" in out
    assert "A FixedLossScale stays, and a ScheduledLossScale changes at its milestones" in out
    assert "On this device (CPU) in pynative mode: the scales after each step: expected [1024.0" in out
    assert "1 of 2 did not hold. Please report this, with all that is printed here." in out
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["held"] is False
    assert [check["held"] for check in written["checks"]] == [True, False]


def test_a_check_that_raises_does_not_hold(monkeypatch, capsys):
    def broken(self, loss_scale, overflow):
        raise KeyError("broken")

    monkeypatch.setattr(LossScale, "adjust", broken)
    assert main(["hysteresis", "--mode", "pynative"]) == 1
    assert "NOT HELD" in capsys.readouterr().out
