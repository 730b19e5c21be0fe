"""
Builds the dry GPU's libraries for the MindSpore of this Python: python build.py [FOLDER]. Needs gcc, g++, nm and c++filt.

Without a folder it builds into a cache folder under the user's temp, where the tools look for it.
"""

import fcntl
import getpass
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SONAMES = [
    "libcublas.so.11",
    "libcurand.so.10",
    "libcudnn.so.8",
    "libcudart.so.11.0",
    "libcuda.so.1",
    "libcusolver.so.11",
    "libcufft.so.10",
    "libcusparse.so.11",
    "libnvrtc.so.11.2",
    "libcuda_ops.so.11",
]
# Counted apart by stubs.c.
COPIES = ["memcpyDtoD", "memcpyDtoH", "memcpyHtoD", "memset"]
OF_CUDA = re.compile(r"(cuda|cublas|cudnn|cusolver|cufft|curand|cusparse|nvrtc|cu[A-Z])")
# MindSpore asks it which of its plugins to take.
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 11.6, V11.6.124"\n'
INCLUDES = [
    "",
    "mindspore",
    "mindspore/core",
    "mindspore/core/include",
    "mindspore/core/mindrt",
    "mindspore/core/mindrt/include",
    "mindspore/ccsrc",
    "mindspore/ccsrc/include",
    "mindspore/ops",
    "mindspore/ops/include",
    "mindspore/ops/kernel/include",
    "third_party",
    "third_party/robin_hood_hashing",
    "third_party/include",
]


def package():
    spec = importlib.util.find_spec("mindspore")
    if spec is None:
        raise SystemExit(f"{sys.executable} has no mindspore")
    return Path(spec.origin).parent


def default_folder():
    """Returns a folder of these sources, this user and this MindSpore."""
    digest = hashlib.sha256(f"{package()} {version('mindspore')}".encode())
    for name in ("build.py", "stubs.c", "launches.cc"):
        digest.update((HERE / name).read_bytes())
    return Path(tempfile.gettempdir()) / f"dry_gpu-{getpass.getuser()}-{digest.hexdigest()[:12]}"


def ready(folder=None):
    """Returns the folder of the built libraries: the one given, DRY_GPU, or the default one, which is built if it is not there."""
    folder = Path(folder or os.environ.get("DRY_GPU") or default_folder())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "liblaunches.so").exists():
            print(f"building {folder}", file=sys.stderr, flush=True)
            build(folder)
    return folder


def symbols(path, *options):
    lines = subprocess.run(["nm", *options, str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


def build(folder):
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        print(_build(work), file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build(folder):
    plugins = package() / "lib" / "plugin"
    plugin = plugins / "libmindspore_gpu.so.11.6"
    run("gcc", "-O1", "-fPIC", "-w", "-c", HERE / "stubs.c", "-o", folder / "stubs.o")
    written = symbols(folder / "stubs.o", "--defined-only")
    needed = symbols(plugin, "-D", "--undefined-only")
    kernels = needed & symbols(plugins / "gpu" / "libcuda_ops.so.11", "-D", "--defined-only")
    kernels = {name for name in kernels if not name.startswith("_ZNSt")}
    stubs = sorted((kernels | {name for name in needed if OF_CUDA.match(name)}) - written)
    names = subprocess.run(["c++filt"], input="\n".join(stubs), capture_output=True, text=True).stdout.splitlines()
    lines = ["long dry_hit(int);"]
    for i, symbol in enumerate(stubs):
        lines.append(f'long s{i}(void) __asm__("{symbol}"); long s{i}(void) {{ return dry_hit({i}); }}')
    for i, name in enumerate(COPIES, len(stubs)):
        lines.append(f"const int dry_id_{name} = {i};")
    quoted = ",\n".join('"' + name.replace('"', "") + '"' for name in [*names, *COPIES])
    lines += [f"const char *dry_names[] = {{{quoted}}};", f"const int dry_count_of_names = {len(stubs) + len(COPIES)};"]
    (folder / "generated.c").write_text("\n".join(lines))
    run(
        "gcc",
        "-O0",
        "-fPIC",
        "-w",
        "-shared",
        "-o",
        folder / "libdry.so",
        folder / "generated.c",
        folder / "stubs.o",
        "-Wl,-soname,libdry.so",
        "-lpthread",
    )
    (folder / "empty.c").write_text("")
    for soname in SONAMES:
        (folder / "version").write_text(f"{soname} {{ }};\n")
        run(
            "gcc",
            "-shared",
            "-fPIC",
            folder / "empty.c",
            "-o",
            folder / soname,
            f"-Wl,-soname,{soname}",
            f"-Wl,--version-script={folder / 'version'}",
            "-Wl,--no-as-needed",
            f"-L{folder}",
            "-ldry",
            "-Wl,-rpath,$ORIGIN",
        )
    include = plugins.parents[1] / "include"
    libraries = [f"-l:libmindspore_{name}.so" for name in ("hardware_abstract", "backend_common", "common", "core")]
    run(
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        "-D_GLIBCXX_USE_CXX11_ABI=0",
        "-DENABLE_FAST_HASH_TABLE=1",
        *(f"-I{include / each}" for each in INCLUDES),
        HERE / "launches.cc",
        "-o",
        folder / "liblaunches.so",
        f"-L{plugins.parent}",
        *libraries,
        "-Wl,--allow-shlib-undefined",
        f"-Wl,-rpath,{plugins.parent}",
    )
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "nvcc").write_text(NVCC)
    (folder / "bin" / "nvcc").chmod(0o755)
    for name in ("generated.c", "stubs.o", "empty.c", "version"):
        (folder / name).unlink()
    return f"{len(stubs)} stubs, {len(written)} written functions"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else default_folder())
    build(target)
    print(target)
