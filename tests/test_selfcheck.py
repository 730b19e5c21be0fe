"""The self-check: its command, and that each of its checks goes red where the package is broken."""

import json
import re

import pytest
from conftest import MODES
from support.mutations import MUTATIONS, MUTATIONS_OF_RANKS, halved
from support.python_process import ROOT, check_msrun, check_python, run_python, skip_with_older_mindspore

import ms_lossscale
from ms_lossscale.loss_scale import LossScale, ScheduledLossScale
from ms_lossscale.selfcheck.checks import CHECKS
from ms_lossscale.selfcheck.command_line import main

NAMES = [check.name for check in CHECKS]


def run(*arguments, cwd):
    return run_python("-m", "ms_lossscale.selfcheck", *arguments, cwd=cwd)


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
@pytest.mark.parametrize("mutation", MUTATIONS_OF_RANKS)
def test_the_check_of_ranks_can_fail(mutation, tmp_path):
    job = check_msrun(2, ROOT / "tests" / "support" / "mutations.py", mutation, cwd=tmp_path)
    for log in job.logs:
        (line,) = (line for line in log.splitlines() if line.startswith('[{"name"'))
        (result,) = json.loads(line)
        assert {result["name"]} == MUTATIONS_OF_RANKS[mutation][2]
        assert not result["held"]
        assert "the ranks hold different weights" in result["message"]


def test_no_check_is_left_out():
    mutations = [*MUTATIONS.values(), *MUTATIONS_OF_RANKS.values()]
    assert set().union(*(expected for *_, expected in mutations)) == set(NAMES)


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
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_check_can_fail(mutation, tmp_path):
    skip_with_older_mindspore("what breaks the package does so with any MindSpore")
    *_, expected = MUTATIONS[mutation]
    results = json.loads(
        check_python(ROOT / "tests" / "support" / "mutations.py", mutation, cwd=tmp_path).splitlines()[-1]
    )
    assert {result["name"] for result in results if not result["held"]} == expected
    for result in results:
        if not result["held"]:
            assert result["message"].startswith("On this device (CPU")
            # It says what is wrong, and is no crash.
            assert "Error:" not in result["message"]


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
