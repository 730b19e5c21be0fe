"""The self-check: its command, and that each of its checks goes red where the package is broken."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import MODES, nightly, slow
from support.breakages import BREAKAGES
from support.python_process import (
    ROOT,
    check_msrun,
    check_python,
    python_environment,
    run_msrun,
    run_python,
    skip_with_older_mindspore,
)

import ms_lossscale

# The command as Python runs it, and its list of checks.
from ms_lossscale.selfcheck.__main__ import main
from ms_lossscale.selfcheck.checks import CHECKS

NAMES = [check.name for check in CHECKS]
SUPPORT = ROOT / "tests" / "support"


# The emulated NPU is the only one that is tried before each change.
@pytest.mark.parametrize("options", [*slow([]), ["--emulate"]], ids=["cpu", "emulated"])
def test_all_holds_in_both_modes(options, tmp_path):
    command = ["-m", "ms_lossscale.selfcheck", "--device", "CPU", "--json", "result.json", *options]
    result = run_python(*command, cwd=tmp_path, timeout=600)
    assert result.returncode == 0, result.stdout
    emulates = bool(options)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written.keys() == {"held", "checks", "device", "versions", "environment"}
    assert written["held"] is True
    assert written["versions"]["ms_lossscale"] == ms_lossscale.__version__
    assert written["environment"]["MS_ASCEND_CHECK_OVERFLOW_MODE"] == "not set"
    missing = {"has_ranks", "gradients_show_it" if emulates else "has_register"}
    expected = [check.name for check in CHECKS if not missing & set(check.needs)]
    assert len(expected) == 27
    assert [(check["name"], check["mode"]) for check in written["checks"]] == [
        (name, mode) for mode in MODES for name in expected
    ]
    assert all(check["held"] and check["message"] == "" and check["seconds"] >= 0 for check in written["checks"])
    detector = "FloatStatusRegister" if emulates else "FiniteGradients"
    assert f"Overflow detector: {detector}," in result.stdout


@pytest.mark.slow
def test_ranks_are_checked_under_msrun(tmp_path):
    names = "an-overflow-on", "sharing-the-optimizers-state"
    check_msrun(2, "python", "-m", "ms_lossscale.selfcheck", *names, "--json", "result.json", cwd=tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert [check["held"] for check in written["checks"]] == [True] * 4


@pytest.mark.parametrize("name", nightly(*(name for name, its in BREAKAGES.items() if its.where == "ranks")))
def test_the_check_of_ranks_can_fail(name, tmp_path):
    arguments = [SUPPORT / "breakages.py", "--run", name, *BREAKAGES[name].checks, "--mode", "graph"]
    job = run_msrun(2, *arguments, cwd=tmp_path)
    # msrun may end one of them as soon as the other has failed.
    assert any("1 did not hold" in log and "the ranks hold different weights" in log for log in job.logs)


# All take minutes. These go red within seconds.
@pytest.mark.parametrize("names", [["no_hysteresis", "a_scheduled_scale_backs_off"], *nightly([])], ids=len)
def test_each_check_can_fail(names, tmp_path):
    if not names:
        skip_with_older_mindspore("what breaks the package does so with any MindSpore")
    printed = check_python(SUPPORT / "breakages.py", *names, cwd=tmp_path, timeout=1200)
    reasons = dict(map(json.loads, printed.splitlines()))
    expected = names or [name for name, its in BREAKAGES.items() if its.where != "ranks"]
    assert {name: set(its) for name, its in reasons.items()} == {name: set(BREAKAGES[name].checks) for name in expected}
    # It says what is wrong, and is no crash.
    assert [its for its in reasons.items() if not all(why and "Error:" not in why for why in its[1].values())] == []


def test_no_check_is_left_out_and_the_list_names_each_claim(capsys):
    assert {name for its in BREAKAGES.values() for name in its.checks} == set(NAMES)
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{check.name}: {check.claim}" for check in CHECKS]
    assert len(NAMES) == len(set(NAMES)) and all(re.fullmatch(r"\S.*[.]", check.claim) for check in CHECKS)
    # Names are chosen by their beginnings.
    names = ["an-overflow-in-the-forward-is-seen", "an-overflow-in-the-backward-is-seen", "hysteresis-waits"]
    for quick, expected in (([], names), (["--quick"], names[:2])):
        assert main(["--list", *quick, "an-overflow-in", "hysteresis-waits"]) == 0
        assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == expected


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no-such-check"], "'no-such-check'"),
        (["--device", "GPU", "--emulate"], "GPU"),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
        (["--timeout", "0"], "> 0 and < 1e9, but got 0"),
        (["--timeout", "nan"], "but got nan"),
        *slow(
            (["--device", "Nothing"], "Nothing"),
            (["--device", "Ascend"], "Ascend"),
            (["reading-the-register"], "reading-the-register-consumes-it"),
        ),
    ],
)
def test_what_could_not_run_is_told_apart(arguments, words, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capfd.readouterr().err
    assert words in err
    assert "Traceback" not in err


def run_planted(tmp_path, *names):
    """Runs planted checks in graph mode. Returns the result, and what was written of each check."""
    arguments = [*names, "--device", "CPU", "--mode", "graph", "--timeout", "2", "--json", "result.json"]
    result = run_python(SUPPORT / "planted_checks.py", *arguments, cwd=tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    return result, {check["name"]: check for check in written["checks"]}


def messages(checks):
    return {name: check["message"].rpartition(" mode: ")[2] for name, check in checks.items()}


IN_ONE = {"one-fails": "nothing came", "one-raises": "KeyError: 'broken'", "one-holds": ""}


@pytest.mark.parametrize(
    "name, message, words",
    [
        ("two-crashes", r"its process ended with SIGSEGV, Segmentation fault, after \d+\.\d s", "Segmentation fault"),
        *slow(
            ("two-hangs", "it did not end in 2 s", "Timeout"),
            ("two-exits", r"its process ended with exit status 0 after \d+\.\d s", ""),
        ),
    ],
)
def test_whatever_ends_a_process_ends_only_its_check(name, message, words, tmp_path):
    result, checks = run_planted(tmp_path, "one", name, "three")
    assert result.returncode == 1
    assert result.stdout.count("Not for this device: one-is-for-others") == 1
    assert json.loads((tmp_path / "result.json").read_text())["held"] is False
    # Where it hung or crashed.
    assert words in result.stderr and (f"in {name.replace('-', '_')}" in result.stderr) is bool(words)
    ended = messages(checks).pop(name)
    assert re.fullmatch(message, ended)
    assert messages(checks) == {**IN_ONE, name: ended, "three-holds": ""}
    if name == "two-crashes":  # The last one of all.
        alone = run_planted(tmp_path, "one-holds", name)[1]
        assert re.fullmatch(message, messages(alone)[name]) and alone[name]["seconds"] > 0
    for check in checks.values():
        failed = bool(check["message"])
        row = next(line for line in result.stdout.splitlines() if f" {check['name']} " in line)
        assert (not check["held"]) is ("NOT HELD" in row) is failed
        if failed:
            assert check["message"].startswith("On this device (CPU) in graph mode: ")
            assert f"    {check['claim']}\n    {check['message']}\n" in result.stdout
    assert f"5 of 5 checks ran, 3 did not hold. one-fails, one-raises, {name}\n" in result.stdout
    assert "Please report this, with all that is printed here." in result.stdout


@pytest.mark.slow
def test_a_crash_after_the_last_check_is_told(tmp_path):
    result, checks = run_planted(tmp_path, "one-holds", "two-ends-before-a-crash")
    assert result.returncode == 1
    assert messages(checks) == {"one-holds": "", "two-ends-before-a-crash": ""}
    assert "outside of any check, its process ended with SIGSEGV" in result.stderr


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, number, status",
    [("two-sleeps", signal.SIGINT, 130), ("two-hangs", signal.SIGKILL, -signal.SIGKILL)],
    ids=["interrupted alone", "killed"],
)
def test_no_check_goes_on_after_the_command(name, number, status, tmp_path):
    command = [sys.executable, SUPPORT / "planted_checks.py", "one-holds", name, "three", "--device", "CPU"]
    options = {"cwd": tmp_path, "env": python_environment(), "stdout": subprocess.DEVNULL}
    result = tmp_path / "result.json"
    with subprocess.Popen([*map(str, command), "--mode", "graph", "--json", "result.json"], **options) as process:
        wait_for(lambda: result.exists() and f'"{name}"' in result.read_text())
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        try:
            process.send_signal(number)
            assert process.wait(30) == status
            wait_for(lambda: not is_alive(child), 10)
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    # The next check has not begun.
    assert [check["name"] for check in json.loads(result.read_text())["checks"]] == ["one-holds", name]
