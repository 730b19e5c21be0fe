"""
Runs a Python program on an Ascend NPU that is pretended:

    python run.py [--soc Ascend910A] [--saturation] [--numpy] [--jit-level O2] [--trace FILE] SCRIPT [ARGUMENT ...]
    python run.py --numpy -m ms_lossscale.selfcheck --device Ascend

Without --numpy kernels do nothing. With it NumPy computes them; a kernel that is not known there ends the run with status
3, whatever the program makes of it. PYTHONPATH must name the checkout of ms_lossscale, as ever.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import build

HERE = Path(__file__).resolve().parent
# The status of a run in which a kernel was asked for that is not known.
UNKNOWN = 3


def environment(
    soc="Ascend910B2", saturation=False, numpy=False, jit_level="O0", trace=None, unknown=None, folder=None
):
    """Returns the environment of a process whose MindSpore finds a pretended NPU."""
    cann = build.ready(folder) / "cann"
    env = dict(os.environ)
    for name in (
        "MS_SIMULATION_LEVEL",
        "MS_ASCEND_CHECK_OVERFLOW_MODE",
        "DRY_ASCEND_TRACE",
        "DRY_ASCEND_NUMPY",
        "DRY_ASCEND_UNKNOWN",
    ):
        env.pop(name, None)
    env.update(
        LD_LIBRARY_PATH=f"{cann}/lib64",
        ASCEND_HOME_PATH=str(cann),
        ASCEND_TOOLKIT_HOME=str(cann),
        ASCEND_OPP_PATH=f"{cann}/opp",
    )
    env.update(RANK_SIZE="1", RANK_ID="0", DRY_ASCEND_SOC=soc, DRY_ASCEND_JIT_LEVEL=jit_level)
    env.update(GLOG_v=env.get("GLOG_v", "3"), ONEDNN_MAX_CPU_ISA=env.get("ONEDNN_MAX_CPU_ISA", "AVX2"))
    # The first of these is imported by every Python that starts there.
    paths = [
        str(HERE / "inside"),
        *filter(None, env.get("PYTHONPATH", "").split(":")),
        f"{cann}/python",
        f"{cann}/opp/built-in/op_impl/ai_core/tbe",
    ]
    env["PYTHONPATH"] = ":".join(paths)
    if saturation:
        env["MS_ASCEND_CHECK_OVERFLOW_MODE"] = "SATURATION_MODE"
    for name, value in (("TRACE", trace), ("UNKNOWN", unknown), ("NUMPY", "1" if numpy else None)):
        if value:
            env[f"DRY_ASCEND_{name}"] = str(value)
    return env


def start(command, **options):
    """Runs Python with this command's arguments there. Returns its exit status, and the kernels that were not known."""
    with tempfile.TemporaryDirectory() as folder:
        unknown = Path(folder) / "unknown"
        status = subprocess.call([sys.executable, *command], env=environment(unknown=unknown, **options))
        found = sorted(set(unknown.read_text().splitlines())) if unknown.exists() else []
    return status, found


def main():
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--soc", default="Ascend910B2", help="the chip: Ascend910B2 (default), Ascend910A, Ascend910_9391"
    )
    parser.add_argument("--saturation", action="store_true", help="saturation mode; a 910A knows no other")
    parser.add_argument("--numpy", action="store_true", help="NumPy computes the kernels")
    parser.add_argument(
        "--jit-level",
        default="O0",
        choices=("O0", "O2", "default"),
        help="default: MindSpore's, O2 on a 910A (default: %(default)s)",
    )
    parser.add_argument("--trace", help="a file, to which a line is added for each call and each launch")
    parser.add_argument("--folder", help="where build.py built")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, and its arguments"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, and its arguments")
    options = vars(parser.parse_args())
    module, script = options.pop("module"), options.pop("script")
    if not module and not script:
        parser.error("what is to run?")
    status, unknown = start(["-m", *module] if module else script, **options)
    if unknown:
        print(f"dry_ascend: NumPy's kernels lack {', '.join(unknown)}: this run says nothing.", file=sys.stderr)
    return UNKNOWN if unknown else status


if __name__ == "__main__":
    sys.exit(main())
