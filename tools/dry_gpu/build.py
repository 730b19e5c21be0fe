"""Builds the pretended GPU's libraries. dry_gpu.py calls it: python build.py only says where they are."""

import re
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from dry.libraries import demangled, library_folder, package, run, symbols

HERE = Path(__file__).resolve().parent
COMMANDS = ("gcc", "g++", "nm", "c++filt")
PLUGIN = Path("lib/plugin/libmindspore_gpu.so.11.6")
KERNELS = Path("lib/plugin/gpu/libcuda_ops.so.11")
# What the plugin is linked with: each becomes an empty library that needs the stubs.
SONAMES = (
    *("libcublas.so.11", "libcurand.so.10", "libcudnn.so.8", "libcudart.so.11.0", "libcuda.so.1", "libcusolver.so.11"),
    *("libcufft.so.10", "libcusparse.so.11", "libnvrtc.so.11.2", "libcuda_ops.so.11"),
)
OF_CUDA = re.compile(r"(cuda|cublas|cudnn|cusolver|cufft|curand|cusparse|nvrtc|cu[A-Z])")
# What cuda.c counts by itself.
COUNTED = ("memcpyDtoD", "memcpyDtoH", "memcpyHtoD", "memset")
# MindSpore asks it which of its plugins to take.
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 11.6, V11.6.124"\n'
INCLUDES = (
    *("", "mindspore", "mindspore/core", "mindspore/core/include", "mindspore/core/mindrt"),
    *("mindspore/core/mindrt/include", "mindspore/ccsrc", "mindspore/ccsrc/include", "mindspore/ops"),
    *("mindspore/ops/include", "mindspore/ops/kernel/include", "third_party", "third_party/robin_hood_hashing"),
    "third_party/include",
)
LINKED = ("hardware_abstract", "backend_common", "common", "core")


def folder():
    """Returns the folder of the libraries."""
    return library_folder(HERE, COMMANDS, build)


def build(target):
    objects = target / "objects"
    objects.mkdir()
    for source in HERE.glob("*.c"):
        run("gcc", "-O1", "-fPIC", "-w", "-c", source, "-o", objects / f"{source.stem}.o")
    (objects / "generated.c").write_text(generated(objects))
    run("gcc", "-O0", "-fPIC", "-w", "-c", objects / "generated.c", "-o", objects / "generated.o")
    run("gcc", "-shared", "-o", target / "libdry.so", *objects.glob("*.o"), "-Wl,-soname,libdry.so", "-lpthread")
    build_empty_libraries(target, objects)
    build_hooks(target)
    (target / "bin").mkdir()
    (target / "bin" / "nvcc").write_text(NVCC)
    (target / "bin" / "nvcc").chmod(0o755)
    shutil.rmtree(objects)


def generated(objects):
    """Returns a C source with a stub of each function that MindSpore's plugin needs and no source here has."""
    written = {name for each in objects.glob("*.o") for name in symbols(each, "--defined-only")}
    needed = set(symbols(package() / PLUGIN, "-D", "--undefined-only"))
    kernels = needed & set(symbols(package() / KERNELS, "-D", "--defined-only"))
    of_std = {name for name in kernels if name.startswith("_ZNSt")}
    of_cuda = {name for name in needed if OF_CUDA.match(name)}
    stubs = sorted((kernels - of_std | of_cuda) - written)
    names = [*demangled(stubs).values(), *COUNTED]
    lines = ["long dry_called(int);"]
    for i, symbol in enumerate(stubs):
        lines.append(f'long stub{i}(void) __asm__("{symbol}");')
        lines.append(f"long stub{i}(void) {{ return dry_called({i}); }}")
    lines += [f"const int dry_id_{name} = {i};" for i, name in enumerate(COUNTED, len(stubs))]
    quoted = ",\n".join('"' + name.replace('"', "") + '"' for name in names)
    lines += [f"const char *dry_names[] = {{{quoted}}};", f"const int dry_number_of_names = {len(names)};"]
    return "\n".join(lines) + "\n"


def build_empty_libraries(target, objects):
    """Builds a library of each name that the plugin is linked with. All they have is libdry.so, which they need."""
    (objects / "empty.c").write_text("")
    for soname in SONAMES:
        versions = objects / "versions"
        versions.write_text(f"{soname} {{ }};\n")
        named = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={versions}", "-Wl,-rpath,$ORIGIN"]
        linked = ["-Wl,--no-as-needed", f"-L{target}", "-ldry"]
        run("gcc", "-shared", "-fPIC", objects / "empty.c", "-o", target / soname, *named, *linked)


def build_hooks(target):
    """Builds the library that stands before MindSpore's functions, with the headers of MindSpore's wheel."""
    headers = [f"-I{package() / 'include' / each}" for each in INCLUDES]
    as_mindspore = ["-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0", "-DENABLE_FAST_HASH_TABLE=1"]
    libraries = package() / "lib"
    linked = [f"-L{libraries}", *(f"-l:libmindspore_{name}.so" for name in LINKED), f"-Wl,-rpath,{libraries}"]
    options = ["-O1", "-w", "-fPIC", "-shared", "-Wl,--allow-shlib-undefined"]
    run("g++", *as_mindspore, *options, *headers, *HERE.glob("*.cc"), "-o", target / "liblaunches.so", *linked)


if __name__ == "__main__":
    print(folder())
