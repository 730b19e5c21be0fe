"""A plugin of pytest: skips a test that fails because NumPy lacks a kernel for it."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    from dry_ascend import launches

    lacking = sorted(set(launches.lacking))
    if lacking and call.when == "call" and report.failed:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], f"Skipped: NumPy has no kernel {', '.join(lacking)}")
    if lacking and call.when == "teardown":
        launches.lacking.clear()
    return report
