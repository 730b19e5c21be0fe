"""
Runs a Python program on an Ascend NPU that is not there: MindSpore's Ascend backend compiles and launches as ever, and
a library of stubs stands in for CANN.

    python tools/dry_ascend/run.py [OPTIONS] SCRIPT [ARGUMENT ...]
    python tools/dry_ascend/run.py --numpy --saturation -m ms_lossscale.selfcheck --device Ascend
    python tools/dry_ascend/run.py --numpy -m pytest --device Ascend -n 0 tests/cells

Without --numpy kernels do nothing. With it NumPy computes them; one that it lacks ends the run with status 3, whatever
the program makes of it, but for pytest, where a test that needs it is skipped. ms_lossscale is that of this checkout,
unless --checkout names another. Exit status 2: MindSpore 2.10 or a compiler is missing.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import build
from dry import processes

INSIDE = Path(__file__).resolve().parent / "inside"
LACKING = 3
# Of whoever started this: they would change what a run is.
NOT_INHERITED = ("MS_SIMULATION_LEVEL", "MS_ASCEND_CHECK_OVERFLOW_MODE", "DRY_ASCEND_TRACE", "DRY_ASCEND_NUMPY")


def environment(
    soc="Ascend910B2", saturation=False, numpy=False, jit_level="O0", trace=None, lacking=None, checkout=processes.ROOT
):
    """Returns the environment of a process whose MindSpore finds a pretended NPU."""
    cann = build.folder()
    env = {name: value for name, value in processes.environment(checkout).items() if name not in NOT_INHERITED}
    # `sitecustomize` in the first of these is imported by every Python that starts there.
    env["PYTHONPATH"] = f"{INSIDE}:{env['PYTHONPATH']}:{cann}/python:{cann}/opp/built-in/op_impl/ai_core/tbe"
    # MindSpore's log has errors about channels and packages that nothing here needs; what it raises says enough.
    env.setdefault("GLOG_v", "4")
    env["PYTEST_PLUGINS"] = "dry_ascend.skips"
    env.update(ASCEND_HOME_PATH=str(cann), ASCEND_TOOLKIT_HOME=str(cann), ASCEND_OPP_PATH=f"{cann}/opp")
    env.update(LD_LIBRARY_PATH=f"{cann}/lib64", RANK_SIZE="1", RANK_ID="0")
    env.update(DRY_ASCEND_SOC=soc, DRY_ASCEND_JIT_LEVEL=jit_level)
    if saturation:
        env["MS_ASCEND_CHECK_OVERFLOW_MODE"] = "SATURATION_MODE"
    for name, value in (("TRACE", trace), ("LACKING", lacking), ("NUMPY", "1" if numpy else None)):
        if value:
            env[f"DRY_ASCEND_{name}"] = str(value)
    return env


def start(command, **options):
    """Runs Python there. Returns its exit status, and the kernels that NumPy lacked."""
    with tempfile.TemporaryDirectory() as folder:
        lacking = Path(folder) / "lacking"
        status = subprocess.call([sys.executable, *command], env=environment(lacking=lacking, **options))
        found = sorted(set(lacking.read_text().splitlines())) if lacking.exists() else []
    return status, found


def main():
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--soc", default="Ascend910B2", help="the chip: Ascend910B2 (default), Ascend910A, Ascend910_9391")
    add("--saturation", action="store_true", help="saturation mode; a 910A knows no other")
    add("--numpy", action="store_true", help="NumPy computes the kernels")
    levels = ("O0", "O2", "default")
    add("--jit-level", default="O0", choices=levels, help="default: MindSpore's, O2 on a 910A (default: %(default)s)")
    add("--trace", metavar="FILE", help="a file to which each call and each launch adds a line")
    add("--checkout", metavar="FOLDER", default=processes.ROOT, help="another checkout of ms_lossscale")
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, and its arguments")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, and its arguments")
    options = vars(parser.parse_args())
    module, script = options.pop("module"), options.pop("script")
    if not module and not script:
        parser.error("what is to run?")
    status, lacking = start(["-m", *module] if module else script, **options)
    if lacking and module[:1] != ["pytest"]:
        print(f"dry_ascend: NumPy's kernels lack {', '.join(lacking)}: this run says nothing.", file=sys.stderr)
        return LACKING
    return status


if __name__ == "__main__":
    sys.exit(main())
