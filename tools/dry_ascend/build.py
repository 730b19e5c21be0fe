"""
Builds a pretended CANN for the MindSpore of this Python: python build.py [FOLDER]. Needs gcc, g++, nm, strings and c++filt.

Without a folder it builds into a cache folder under the user's temp, where run.py looks for it.
"""

import fcntl
import getpass
import glob
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
# Under lib/ of MindSpore: what a start of its Ascend backend loads.
PLUGIN = ["plugin/libmindspore_ascend.so.2", "plugin/libmindspore_ops_ascend.so", "libmindspore_ge_backend.so"]
PLUGIN += [
    f"plugin/ascend/{name}.so"
    for name in [
        "libd_collective",
        "libmindspore_ascend_res_manager",
        "libmindspore_graph_ir",
        "libmindspore_internal_kernels",
        "libhccl_plugin",
    ]
]
SHARED_MEMORY = "plugin/ascend/ms_kernels_symmetric_memory/shmem"
PLUGIN += [
    f"{SHARED_MEMORY}/shmem/lib/libshmem.so",
    f"{SHARED_MEMORY}/memfabric_hybrid/lib/libmf_smem.so",
    f"{SHARED_MEMORY}/memfabric_hybrid/lib/libmf_hybm_core.so",
    "plugin/ascend/ms_kernels_internal/internal_kernel/lib/libms_kernels_internal.so",
]
SYSTEM = [
    "libstdc++.so.6",
    "libm.so.6",
    "libgomp.so.1",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libc.so.6",
    "libdl.so.2",
    "ld-linux-x86-64.so.2",
    "librt.so.1",
]
# CANN's libraries: each a link to the one that is built.
LIBRARIES = [
    "ge_runner",
    "graph",
    "ascendcl",
    "msprofiler",
    "hccl",
    "runtime",
    "platform",
    "c_sec",
    "nnopbase",
    "ascend_hal",
    "opapi",
    "acl_op_compiler",
    "acl_tdt_channel",
    "acl_tdt_queue",
    "profapi",
    "register",
    "mmpa",
    "ascendalog",
    "ascend_ml",
    "gmem",
]
# What is never a name of CANN's, though nothing here defines it.
OF_OTHERS = re.compile(r"_?Py|_ITM|__gmon|__gcov|__cxa|_Jv|_ZTH|.*Mki_ms")
# Names that MindSpore looks up by dlsym: they stand in its libraries as strings.
LOOKED_UP = re.compile(
    r"^(acl[a-z]*[A-Z]\w+|[Hh]ccl\w+|rt[A-Z]\w+|aclnn\w+|Msprof\w+|hal[A-Z]\w+|mstx\w+|tdt\w+|AclrtMemcpy\w*"
    r"|(?:Init|UnInit|Release)\w*HugeMem\w*|(?:Init|UnInit)PTACacheThreadLocal|PTAGetExecCache|PTAFindExecCache|SetPTAHashKey"
    r"|CanUsePTACache|CheckPTACacheAble|AddTensorAddrToCachedList|GetOpExecCache\w*)$"
)
# What C++ functions of CANN's graph engine must leave behind, by their demangled names.
ZERO = ("movq $0,(%rdi)", "movq $0,8(%rdi)")
SELF = ("mov %rdi,%rax", "ret")
BODIES = [
    (r"ge::(Shape|TensorDesc|Tensor|Graph|AscendString|TensorType|Promote|GraphBuffer)::\1\(", (*ZERO, *SELF)),
    (r"ge::Operator::Operator\(", ("movq $0,8(%rdi)", "movq $0,16(%rdi)", *SELF)),
    (
        r"ge::(Operator::Get(Out|In)putDesc|TensorDesc::Get(Origin)?Shape|Tensor::GetTensorDesc|Session::GetCompiledGraphSummary)\(",
        (*ZERO, *SELF),
    ),
    # An empty string of the old ABI.
    (
        r"ge::(Operator::Get(Name|OpType)\(\)|Graph::GetName\(\))",
        ("movq _ZNSs4_Rep20_S_empty_rep_storageE@GOTPCREL(%rip),%rax", "addq $24,%rax", "movq %rax,(%rdi)", *SELF),
    ),
    # An empty vector.
    (
        r"ge::(OperatorFactory::CreateOperator|Shape::GetDims|GNode::Get(In|Out)|Graph::GetDirectNode)",
        (*ZERO, "movq $0,16(%rdi)", *SELF),
    ),
    (r"ge::OperatorFactory::IsExistOp", ("mov $1,%eax", "ret")),
    (r"ge::(Operator|Graph)::(Set|Add|Update)", SELF),
    ("", ("xor %eax,%eax", "ret")),
]
MAKES_AN_OBJECT = re.compile(
    r"aclrtAllocatorCreateDesc|acl(Create|Get\w*Addr)|aclmdlCreate|aclopCreate|acltdtCreate|aclprofCreate"
)
ENTRIES = """
stub_two_phase:
  push %r9
  push %r8
  push %rcx
  push %rdx
  push %rsi
  push %rdi
  mov %rsp,%rdi
  mov %rax,%rsi
  sub $8,%rsp
  call stub_prepare@PLT
  add $56,%rsp
  ret
stub_launch:
  mov %rax,%r8
  jmp stub_run@PLT
.section .note.GNU-stack,"",@progbits
"""


def package():
    spec = importlib.util.find_spec("mindspore")
    if spec is None:
        raise SystemExit(f"{sys.executable} has no mindspore")
    return Path(spec.origin).parent


def default_folder():
    """Returns a folder of these sources, this user and this MindSpore."""
    digest = hashlib.sha256(f"{package()} {version('mindspore')}".encode())
    for name in ("build.py", "device.cpp"):
        digest.update((HERE / name).read_bytes())
    return Path(tempfile.gettempdir()) / f"dry_ascend-{getpass.getuser()}-{digest.hexdigest()[:12]}"


def ready(folder=None):
    """Returns the folder of what was built: the one given, DRY_ASCEND, or the default one, which is built if it is not there."""
    folder = Path(folder or os.environ.get("DRY_ASCEND") or default_folder())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "cann" / "lib64" / "libascend_stub.so").exists():
            print(f"building {folder}", file=sys.stderr, flush=True)
            build(folder)
    return folder


def output_of(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options).stdout


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


def symbols(path, *options):
    """Returns the symbols of a library and their kinds."""
    lines = output_of("nm", "-D", *options, path).splitlines()
    return {name.partition("@")[0]: kind for kind, name in (line.split()[-2:] for line in lines)}


def needed(libraries):
    """Returns what the plugin's libraries need and nothing at hand defines."""
    roots = [libraries / name for name in PLUGIN]
    others = [
        *map(Path, glob.glob(f"{libraries}/*.so*") + glob.glob(f"{libraries.parent}/*.so")),
        libraries / "plugin" / "libmindspore_ops_cpu.so",
    ]
    system = [
        next(
            (
                Path(f, name)
                for f in ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64")
                if os.path.exists(f"{f}/{name}")
            ),
            None,
        )
        for name in SYSTEM
    ]
    defined = set()
    for library in {*roots, *others, *filter(None, system), Path(os.path.realpath(sys.executable))}:
        defined |= set(symbols(library, "--defined-only"))
    found = {name for root in roots for name, kind in symbols(root, "--undefined-only").items() if kind != "w"}
    return {name for name in found - defined if not OF_OTHERS.match(name)}


def looked_up(libraries):
    """Returns the names that the plugin looks up while it runs. An operator of aclnn has two functions."""
    files = [libraries / name for name in (*PLUGIN[:3], "libmindspore_pyboost.so")] + list(
        map(Path, glob.glob(f"{libraries}/plugin/ascend/*.so"))
    )
    found = {line for file in files for line in output_of("strings", "-a", file).splitlines() if LOOKED_UP.match(line)}
    operators = {name.removesuffix("GetWorkspaceSize") for name in found if name.startswith("aclnn")}
    return found | operators | {name + "GetWorkspaceSize" for name in operators}


def stubs(libraries):
    """Returns an assembler's and a C source with a stub of each name that device.cpp lacks."""
    written = set(re.findall(r"SPECIAL\((\w+)\)", (HERE / "device.cpp").read_text()))
    names = sorted((needed(libraries) | looked_up(libraries)) - written)
    demangled = dict(zip(names, output_of("c++filt", input="\n".join(names)).splitlines()))
    assembler, c = [".text"], ["void stub_trace(const char *);", "extern char stub_object[];"]

    def emit(name, *body):
        assembler.extend([f".globl {name}", f".type {name},@function", f"{name}:", *("  " + line for line in body)])

    for name in names:
        if name.startswith("_Z"):
            emit(name, *next(body for pattern, body in BODIES if re.match(pattern, demangled[name])))
        elif name.startswith("aclnn") and name not in ("aclnnInit", "aclnnFinalize"):
            emit(
                name,
                f"leaq .Lname_{name}(%rip),%rax",
                "jmp " + ("stub_two_phase" if name.endswith("GetWorkspaceSize") else "stub_launch"),
            )
            assembler.append(f'.section .rodata\n.Lname_{name}: .string "{name}"\n.text')
        else:
            result = "(long)stub_object" if MAKES_AN_OBJECT.match(name) else 0
            c.append(f'long {name}() {{ stub_trace("{name}"); return {result}; }}')
    return "\n".join(assembler) + ENTRIES, "\n".join(c), len(names)


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
    # MindSpore cuts paths after a folder of this name.
    cann = folder / "cann"
    for name in ("lib64/driver", "opp/built-in/op_impl/ai_core/tbe", "compiler", "python", "objects"):
        (cann / name).mkdir(parents=True)
    objects = cann / "objects"
    assembler, c, count = stubs(package() / "lib")
    (objects / "stubs.S").write_text(assembler)
    (objects / "traced.c").write_text(c)
    old_strings = "-D_GLIBCXX_USE_CXX11_ABI=0"
    run("g++", "-O1", "-w", "-fPIC", old_strings, "-c", HERE / "device.cpp", "-o", objects / "device.o")
    run("gcc", "-O0", "-w", "-fPIC", "-fno-builtin", "-c", objects / "traced.c", "-o", objects / "traced.o")
    run("gcc", "-fPIC", "-c", objects / "stubs.S", "-o", objects / "stubs.o")
    library = cann / "lib64" / "libascend_stub.so"
    run("g++", "-shared", "-o", library, *objects.glob("*.o"), "-Wl,-soname,libascend_stub.so", "-lpthread")
    shutil.rmtree(objects)
    for name in LIBRARIES:
        (cann / "lib64" / f"lib{name}.so").symlink_to(library.name)
    (cann / "lib64" / "driver" / "libascend_hal.so").symlink_to(Path("..") / library.name)
    # Of another version MindSpore would not use AllFinite, its own operator.
    (cann / "compiler" / "version.info").write_text("Version=9.1.0\n")
    return f"{count} stubs"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else default_folder())
    build(target)
    print(target)
