"""The self-check: its command, and that each of its checks goes red where the package is broken."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from conftest import MODES, nightly, slow
from support.mutants import MUTANTS
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
from ms_lossscale.selfcheck.checks import CHECKS
from ms_lossscale.selfcheck.command_line import main
from ms_lossscale.selfcheck.report import address_for_reports

NAMES = [check.name for check in CHECKS]
QUICK = [check for check in CHECKS if check.quick]
SUPPORT = ROOT / "tests" / "support"
PLANTED = SUPPORT / "planted_checks.py"
BROKEN = [mutant for mutant in MUTANTS if mutant.checks and not mutant.ranks]
BROKEN_FOR_RANKS = [mutant for mutant in MUTANTS if mutant.checks and mutant.ranks]


def run(*arguments, cwd, **variables):
    return run_python("-m", "ms_lossscale.selfcheck", *arguments, cwd=cwd, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--emulate", "--quick"]], ids=["cpu", "emulated"])
def test_all_holds_in_both_modes(options, tmp_path):
    result = run("--json", "result.json", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    emulates = bool(options)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written.keys() == {"held", "checks", "device", "versions", "environment"}
    assert written["held"] is True
    assert written["versions"]["ms_lossscale"] == ms_lossscale.__version__
    assert written["environment"]["MS_ASCEND_CHECK_OVERFLOW_MODE"] == "not set"
    missing = {"has_ranks", "gradients_show_it" if emulates else "has_register"}
    expected = [check.name for check in (QUICK if emulates else CHECKS) if not missing & set(check.needs)]
    if emulates:
        assert len(expected) == 11
    assert [(check["name"], check["mode"]) for check in written["checks"]] == [
        (name, mode) for mode in MODES for name in expected
    ]
    assert all(check["held"] and check["message"] == "" and check["seconds"] >= 0 for check in written["checks"])
    detector = "FloatStatusRegister" if emulates else "FiniteGradients"
    assert f"Overflow detector: {detector}," in result.stdout
    assert f"All {len(written['checks'])} held." in result.stdout


@pytest.mark.slow
def test_ranks_are_checked_under_msrun(tmp_path):
    names = "an-overflow-on", "sharing-the-optimizers-state"
    check_msrun(2, "python", "-m", "ms_lossscale.selfcheck", *names, "--json", "result.json", cwd=tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert [check["held"] for check in written["checks"]] == [True] * 4


@pytest.mark.parametrize(
    "mutant", [*slow(*BROKEN_FOR_RANKS[:1]), *nightly(*BROKEN_FOR_RANKS[1:])], ids=lambda mutant: mutant.name
)
def test_the_check_of_ranks_can_fail(mutant, tmp_path):
    mutant.copy_package(tmp_path)
    command = ["python", "-m", "ms_lossscale.selfcheck", *mutant.checks, "--mode", "graph"]
    job = run_msrun(2, *command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    # msrun may end one of them as soon as the other has failed.
    assert any("1 of 1 did not hold" in log and "the ranks hold different weights" in log for log in job.logs)


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
    assert main(["--list", "--quick", "an-overflow-in", "hysteresis-waits"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == names[:2]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no-such-check"], "'no-such-check'"),
        (["--device", "GPU", "--emulate"], "GPU"),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
        pytest.param(["--device", "Nothing"], "Nothing", marks=pytest.mark.slow),
        pytest.param(["--device", "Ascend"], "Ascend", marks=pytest.mark.slow),
        pytest.param(["reading-the-register"], "reading-the-register-consumes-it", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_could_not_run_is_told_apart(arguments, words, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capfd.readouterr().err
    assert words in err
    assert "Traceback" not in err


MESSAGES = {
    "one-holds": "",
    "one-fails": "nothing came",
    "one-raises": "KeyError: 'broken'",
    "one-crashes": "it ended its process by SIGSEGV",
    "one-exits": "it ended its process with exit status 3",
    "one-hangs": "it did not end within 2 s",
    "one-waits": "it did not end within 2 s",
    "the-last-holds": "",
}


# The one that runs each time ends one process; the other ends four.
@pytest.mark.parametrize("names", [list(MESSAGES)[1:4] + ["the-last"], *nightly([])], ids=["some", "all"])
def test_whatever_a_check_does_the_next_one_runs(names, tmp_path):
    result = run_python(PLANTED, *names, "--mode", "graph", "--timeout", 2, "--json", "result.json", cwd=tmp_path)
    assert result.returncode == 1
    expected = {name: MESSAGES[name] for name in MESSAGES if not names or name.startswith(tuple(names))}
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["held"] is False
    assert {check["name"]: check["message"].partition(" mode: ")[2] for check in written["checks"]} == expected
    for check in written["checks"]:
        assert check["held"] is not bool(check["message"])
        row = next(line for line in result.stdout.splitlines() if f" {check['name']} " in line)
        assert ("NOT HELD" in row) is bool(check["message"])
        if check["message"]:
            assert check["message"].startswith("On this device (CPU) in graph mode: ")
            assert f"    {check['claim']}\n    {check['message']}\n" in result.stdout
    failed = [name for name, message in expected.items() if message]
    assert f"{len(failed)} of {len(expected)} did not hold: {', '.join(failed)}\n" in result.stdout
    assert "Please report this, with all that is printed here." in result.stdout
    assert names or "Not for this device: one-is-for-others" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "to_all, sent, check",
    [(True, signal.SIGINT, "one-hangs"), (False, signal.SIGKILL, "one-waits")],
    ids=["Ctrl-C", "kill"],
)
def test_a_run_that_is_ended_has_told_what_it_found(to_all, sent, check, tmp_path):
    arguments = ["one-holds", "one-fails", check, "the-last", "--mode", "graph", "--json", "result.json"]
    output = tmp_path / "output.txt"
    # A group of processes of its own, as a terminal's command has one: Ctrl-C goes to all of it. It would be ignored if
    # a shell ran the tests in the background.
    with (
        output.open("wb") as file,
        subprocess.Popen(
            [sys.executable, PLANTED, *arguments],
            cwd=tmp_path,
            env=python_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        wait_for(lambda: re.search(f"{check} +graph +$", output.read_text()))
        (os.killpg if to_all else os.kill)(process.pid, sent)
        status = process.wait(20)
    printed = output.read_text()
    assert status == (130 if to_all else -signal.SIGKILL)
    assert ("Interrupted: 2 of 4 checks ran, 1 did not hold." in printed) is to_all
    assert "Traceback" not in printed
    assert printed.index("MS_ASCEND_CHECK_OVERFLOW_MODE: not set") < printed.index("one-holds")
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["held"], [result["held"] for result in written["checks"]]) == (False, [True, False])
    wait_for(lambda: not is_group(process.pid))


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("waited for a minute")


def is_group(leader):
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def results_of_broken(tmp_path_factory):
    """For each broken package the results of the checks that are to notice."""
    skip_with_older_mindspore("what breaks the package does so with any MindSpore")
    folder, packages = tmp_path_factory.mktemp("broken"), []
    for i, mutant in enumerate(BROKEN):
        mutant.copy_package(folder / str(i))
        packages.append((str(folder / str(i)), sorted(mutant.checks), mutant.emulated))
    (folder / "packages.json").write_text(json.dumps(packages))
    printed = check_python(SUPPORT / "run_checks.py", folder / "packages.json", cwd=folder, timeout=1200)
    return dict(zip(BROKEN, map(json.loads, printed.splitlines())))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.name)
def test_each_check_can_fail(mutant, results_of_broken):
    results = results_of_broken[mutant]
    assert {result["name"] for result in results if not result["held"]} == mutant.checks
    # It says what is wrong, and is no crash.
    assert not [result["message"] for result in results if "Error:" in result["message"]]


def test_where_reports_go_is_the_projects_url(monkeypatch, tmp_path):
    metadata = "Metadata-Version: 2.1\nName: ms_lossscale\nVersion: 0\n"
    for url in ("", "https://example.org/issues"):
        folder = tmp_path / f"path{len(url)}" / "ms_lossscale-0.dist-info"
        folder.mkdir(parents=True)
        folder.joinpath("METADATA").write_text(f"{metadata}Project-URL: Issues, {url}\n" if url else metadata)
        monkeypatch.syspath_prepend(folder.parent)
        assert address_for_reports() == url
