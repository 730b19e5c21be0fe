"""
The libraries of a pretended device: built once for these sources and this MindSpore, and kept in output/dry, or in the
folder that DRY_FOLDER names.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The libraries stand in for what this version's plugins look for.
MINDSPORE = "2.10"
# The exit status where nothing can be built.
CANNOT = 2


def package():
    """Returns the folder of this Python's MindSpore, which is not imported."""
    return Path(importlib.util.find_spec("mindspore").origin).parent


def version():
    """Returns its version."""
    return re.search(r"['\"](.+?)['\"]", (package() / "version.py").read_text())[1]


def missing(commands):
    """Returns what a pretended device needs and does not find here, as text, or None."""
    if importlib.util.find_spec("mindspore") is None:
        return f"MindSpore {MINDSPORE}, which {sys.executable} does not have"
    if not f"{version()}.".startswith(f"{MINDSPORE}."):
        return f"MindSpore {MINDSPORE}, but {sys.executable} has {version()}"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"Linux on x86-64, but this is {platform.system()} on {platform.machine()}"
    absent = [command for command in commands if shutil.which(command) is None]
    return f"{', '.join(absent)}, not found in PATH" if absent else None


def library_folder(sources, commands, build):
    """
    Returns the folder of what `build` builds from a folder of sources, and builds it if it is not there. Ends the
    process if it can't: MindSpore or one of the commands is missing.
    """
    folder = None if missing(()) else _folder(sources)
    if folder is not None and folder.exists():
        return folder
    needed = missing(commands)
    if needed is not None:
        print(f"tools/{sources.name} needs {needed}.", file=sys.stderr)
        sys.exit(CANNOT)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        # Of several processes, one builds.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _build(folder, build)
    return folder


def _folder(sources):
    digest = hashlib.sha256(f"{package()} {version()}".encode())
    for path in sorted([*sources.glob("*.[ch]*"), sources / "build.py", Path(__file__)]):
        digest.update(path.read_bytes())
    kept = Path(os.environ.get("DRY_FOLDER", ROOT / "output" / "dry")).resolve()
    return kept / f"{sources.name}-{digest.hexdigest()[:12]}"


def _build(folder, build):
    print(f"Builds {folder}: ten seconds, once.", file=sys.stderr, flush=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        build(work)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


def output_of(*command, given=None):
    return subprocess.run(list(map(str, command)), input=given, stdout=subprocess.PIPE, text=True, check=True).stdout


def symbols(path, *options):
    """Returns the symbols of a library or an object file, with nm's letter for the kind of each."""
    fields = (line.split()[-2:] for line in output_of("nm", *options, path).splitlines() if line.strip())
    return {name.partition("@")[0]: kind for kind, name in fields}


def demangled(names):
    """Returns C++'s names of symbols."""
    return dict(zip(names, output_of("c++filt", given="\n".join(names)).splitlines()))
