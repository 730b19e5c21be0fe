"""Builds the pretended CANN. run.py calls it: python build.py only says where it is."""

import os
import re
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from dry.libraries import demangled, library_folder, output_of, package, run, symbols

HERE = Path(__file__).resolve().parent
COMMANDS = ("gcc", "g++", "nm", "strings", "c++filt")
# Under lib/ of MindSpore: what a start of its Ascend backend loads.
SHARED_MEMORY = "plugin/ascend/ms_kernels_symmetric_memory/shmem"
PLUGIN = (
    *("plugin/libmindspore_ascend.so.2", "plugin/libmindspore_ops_ascend.so", "libmindspore_ge_backend.so"),
    *("plugin/ascend/libd_collective.so", "plugin/ascend/libmindspore_ascend_res_manager.so"),
    *("plugin/ascend/libmindspore_graph_ir.so", "plugin/ascend/libmindspore_internal_kernels.so"),
    *("plugin/ascend/libhccl_plugin.so", f"{SHARED_MEMORY}/shmem/lib/libshmem.so"),
    *(f"{SHARED_MEMORY}/memfabric_hybrid/lib/{name}.so" for name in ("libmf_smem", "libmf_hybm_core")),
    "plugin/ascend/ms_kernels_internal/internal_kernel/lib/libms_kernels_internal.so",
)
SYSTEM = ("libstdc++.so.6", "libm.so.6", "libgomp.so.1", "libgcc_s.so.1", "libpthread.so.0", "libc.so.6", "libdl.so.2")
SYSTEM += ("ld-linux-x86-64.so.2", "librt.so.1")
SYSTEM_FOLDERS = tuple(map(Path, ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")))
# CANN's libraries: each a link to the one that is built.
LIBRARIES = (
    *("ge_runner", "graph", "ascendcl", "msprofiler", "hccl", "runtime", "platform", "c_sec", "nnopbase", "ascend_hal"),
    *("opapi", "acl_op_compiler", "acl_tdt_channel", "acl_tdt_queue", "profapi", "register", "mmpa", "ascendalog"),
    *("ascend_ml", "gmem"),
)
# What is never a name of CANN's, though nothing here defines it.
OF_OTHERS = re.compile(r"_?Py|_ITM|__gmon|__gcov|__cxa|_Jv|_ZTH|.*Mki_ms")
# Names that MindSpore looks up by dlsym: they stand in its libraries as strings.
LOOKED_UP = re.compile(
    r"^(acl[a-z]*[A-Z]\w+|[Hh]ccl\w+|rt[A-Z]\w+|aclnn\w+|Msprof\w+|hal[A-Z]\w+|mstx\w+|tdt\w+|AclrtMemcpy\w*"
    r"|(?:Init|UnInit|Release)\w*HugeMem\w*|(?:Init|UnInit)PTACacheThreadLocal|PTAGetExecCache|PTAFindExecCache"
    r"|SetPTAHashKey|CanUsePTACache|CheckPTACacheAble|AddTensorAddrToCachedList|GetOpExecCache\w*)$"
)
# Stubs that return an object, and not 0.
MAKES_AN_OBJECT = re.compile(
    r"aclrtAllocatorCreateDesc|acl(Create|Get\w*Addr)|aclmdlCreate|aclopCreate|acltdtCreate|aclprofCreate"
)
# What C++ functions of CANN's graph engine leave behind, by their demangled names, in x86-64's assembler: %rdi is the
# object, or where the result is to be.
ZERO = ("movq $0,(%rdi)", "movq $0,8(%rdi)")
RETURN_IT = ("mov %rdi,%rax", "ret")
EMPTY_OLD_STRING = ("movq _ZNSs4_Rep20_S_empty_rep_storageE@GOTPCREL(%rip),%rax", "addq $24,%rax", "movq %rax,(%rdi)")
BODIES = (
    (r"ge::(Shape|TensorDesc|Tensor|Graph|AscendString|TensorType|Promote|GraphBuffer)::\1\(", (*ZERO, *RETURN_IT)),
    (r"ge::Operator::Operator\(", ("movq $0,8(%rdi)", "movq $0,16(%rdi)", *RETURN_IT)),
    (
        r"ge::(Operator::Get(Out|In)putDesc|TensorDesc::Get(Origin)?Shape|Tensor::GetTensorDesc"
        r"|Session::GetCompiledGraphSummary)\(",
        (*ZERO, *RETURN_IT),
    ),
    (r"ge::(Operator::Get(Name|OpType)\(\)|Graph::GetName\(\))", (*EMPTY_OLD_STRING, *RETURN_IT)),
    # An empty vector.
    (
        r"ge::(OperatorFactory::CreateOperator|Shape::GetDims|GNode::Get(In|Out)|Graph::GetDirectNode)",
        (*ZERO, "movq $0,16(%rdi)", *RETURN_IT),
    ),
    (r"ge::OperatorFactory::IsExistOp", ("mov $1,%eax", "ret")),
    (r"ge::(Operator|Graph)::(Set|Add|Update)", RETURN_IT),
    ("", ("xor %eax,%eax", "ret")),
)
# Where the stubs of an operator go on, with its name in %rax: to stub_prepare with the address of the six registers
# that hold arguments, and to stub_run with the name as fifth argument (operators.cpp).
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
# Of another version, MindSpore would not use AllFinite, an operator of its own.
CANN_VERSION = "9.1.0"


def folder():
    """Returns the folder that stands for CANN's."""
    return library_folder(HERE, COMMANDS, build) / "cann"


def build(target):
    # MindSpore cuts paths behind a folder of this name.
    cann = target / "cann"
    for name in ("lib64/driver", "opp/built-in/op_impl/ai_core/tbe", "compiler", "python", "objects"):
        (cann / name).mkdir(parents=True)
    objects = cann / "objects"
    for source in HERE.glob("*.cpp"):
        options = ["-O1", "-w", "-fPIC", "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0"]
        run("g++", *options, "-c", source, "-o", objects / f"{source.stem}.o")
    written = {name for each in objects.glob("*.o") for name in symbols(each, "--defined-only")}
    names = sorted((needed() | looked_up()) - written)
    (objects / "stubs.S").write_text(assembler(names))
    (objects / "traced.c").write_text(traced(names))
    run("gcc", "-O0", "-w", "-fPIC", "-fno-builtin", "-c", objects / "traced.c", "-o", objects / "traced.o")
    run("gcc", "-fPIC", "-c", objects / "stubs.S", "-o", objects / "stubs.o")
    library = cann / "lib64" / "libascend_stub.so"
    run("g++", "-shared", "-o", library, *objects.glob("*.o"), "-Wl,-soname,libascend_stub.so", "-lpthread")
    shutil.rmtree(objects)
    for name in LIBRARIES:
        (cann / "lib64" / f"lib{name}.so").symlink_to(library.name)
    (cann / "lib64" / "driver" / "libascend_hal.so").symlink_to(Path("..") / library.name)
    (cann / "compiler" / "version.info").write_text(f"Version={CANN_VERSION}\n")


def needed():
    """Returns what the plugin's libraries need and nothing at hand defines."""
    libraries = package() / "lib"
    plugin = [libraries / name for name in PLUGIN]
    found = [path for name in SYSTEM for path in (folder / name for folder in SYSTEM_FOLDERS) if path.exists()]
    others = [*libraries.glob("*.so*"), *package().glob("*.so"), libraries / "plugin" / "libmindspore_ops_cpu.so"]
    defined = set()
    for library in {*plugin, *others, *found, Path(os.path.realpath(sys.executable))}:
        defined |= set(symbols(library, "-D", "--defined-only"))
    wanted = set()
    for library in plugin:
        kinds = symbols(library, "-D", "--undefined-only")
        wanted |= {name for name, kind in kinds.items() if kind != "w"}
    return {name for name in wanted - defined if not OF_OTHERS.match(name)}


def looked_up():
    """Returns the names that the plugin looks up while it runs. An operator of aclnn has two functions."""
    libraries = package() / "lib"
    files = [libraries / name for name in (*PLUGIN[:3], "libmindspore_pyboost.so")]
    files += (libraries / "plugin" / "ascend").glob("*.so")
    found = {line for file in files for line in output_of("strings", "-a", file).splitlines() if LOOKED_UP.match(line)}
    operators = {name[: -len("GetWorkspaceSize")] if name.endswith("GetWorkspaceSize") else name for name in found}
    operators = {name for name in operators if is_operator(name)}
    return found | operators | {f"{name}GetWorkspaceSize" for name in operators}


def is_operator(name):
    return name.startswith("aclnn") and name not in ("aclnnInit", "aclnnFinalize")


def assembler(names):
    """Returns an assembler's source with the stubs of C++ functions and of operators."""
    lines = [".text"]
    of_cpp = demangled([name for name in names if name.startswith("_Z")])
    for name in names:
        if name in of_cpp:
            lines += function(name, *next(body for pattern, body in BODIES if re.match(pattern, of_cpp[name])))
        elif is_operator(name):
            goes_on = "stub_two_phase" if name.endswith("GetWorkspaceSize") else "stub_launch"
            lines += function(name, f"leaq .Lname_{name}(%rip),%rax", f"jmp {goes_on}")
            lines += [".section .rodata", f'.Lname_{name}: .string "{name}"', ".text"]
    return "\n".join(lines) + ENTRIES


def function(name, *body):
    return [f".globl {name}", f".type {name},@function", f"{name}:", *(f"  {line}" for line in body)]


def traced(names):
    """Returns a C source with the stubs of all other functions, whose calls are traced."""
    lines = ["void stub_trace(const char *);", "extern char stub_object[];"]
    for name in names:
        if not name.startswith("_Z") and not is_operator(name):
            result = "(long)stub_object" if MAKES_AN_OBJECT.match(name) else "0"
            lines.append(f'long {name}() {{ stub_trace("{name}"); return {result}; }}')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(folder())
