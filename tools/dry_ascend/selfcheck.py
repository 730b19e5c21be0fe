"""
Runs the self-check of ms_lossscale on an Ascend NPU that is not there, in saturation mode and in inf-nan mode: NumPy
computes, with a status register. Prints each check, then a table of how many held.

    python tools/dry_ascend/selfcheck.py [NAME ...]          # names of checks, or their beginnings; two minutes for all

Exit status: 0, 1 if a check did not hold, 2 if MindSpore 2.10 or a compiler is missing.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import build
import run
from dry.processes import ROOT
from dry.tables import show, table

OVERFLOW_MODES = {"saturation": True, "inf-nan": False}


def held(names, saturation, checkout):
    """Runs the self-check, which prints its checks. Returns how many held and how many ran, and why it broke off."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "result.json"
        command = ["-m", "ms_lossscale.selfcheck", "--device", "Ascend", "--json", str(written), *names]
        status, lacking = run.start(command, saturation=saturation, numpy=True, checkout=checkout)
        checks = json.loads(written.read_text())["checks"] if written.exists() else []
    count = sum(check["held"] for check in checks)
    if lacking:
        return count, len(checks), f"NumPy lacks {', '.join(lacking)}"
    return count, len(checks), "-" if checks and status < 2 else f"exit status {status}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all checks")
    parser.add_argument(
        "--modes", nargs="+", choices=OVERFLOW_MODES, default=list(OVERFLOW_MODES), help="default: both"
    )
    parser.add_argument("--checkout", metavar="FOLDER", default=ROOT, help="another checkout of ms_lossscale")
    parser.add_argument("--output", metavar="FILE", help="add the table to this file, below the command")
    args = parser.parse_args()
    build.folder()
    rows = []
    for mode in args.modes:
        print(f"\n== {mode} mode", flush=True)
        rows.append([mode, *held(args.names, OVERFLOW_MODES[mode], args.checkout)])
    show(table(["overflow mode", "held", "of", "trouble"], rows), args.output)
    return int(any(count < ran or why != "-" for _, count, ran, why in rows))


if __name__ == "__main__":
    sys.exit(main())
