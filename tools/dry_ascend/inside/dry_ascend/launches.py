"""Computes each launch by a kernel of kernels.py. One that is not there, or fails, is named, and its launch fails."""

import atexit
import ctypes
import os
import sys
import traceback

import numpy as np

from dry_ascend import library
from dry_ascend.kernels import KERNELS
from dry_ascend.memory import Arguments, operand, value_of

# What NumPy could not compute.
lacking = []


def lacks(what):
    print(f"dry_ascend: no kernel {what}", file=sys.stderr, flush=True)
    lacking.append(what)
    if "DRY_ASCEND_LACKING" in os.environ:
        with open(os.environ["DRY_ASCEND_LACKING"], "a") as file:
            file.write(f"{what}\n")


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
)
def launch(name, count, inputs, addresses, attributes):
    """`inputs` is 0 for an operator of aclnn, whose arguments stand for themselves; others have pairs of addresses."""
    name = name.decode()
    if name not in KERNELS:
        lacks(name)
        return 1
    try:
        if inputs:
            values = [operand(addresses[i], addresses[i + 1]) for i in range(0, count, 2)]
        else:
            values = [value_of(addresses[i]) for i in range(count)]
        with np.errstate(all="ignore"):
            KERNELS[name](Arguments(values, attributes))
    except Exception as error:
        traceback.print_exc()
        lacks(f"{name} ({type(error).__name__})")
        return 1
    return 0


def install():
    library.stub_is_object.argtypes = [ctypes.c_uint64]
    library.stub_attribute.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_double), ctypes.c_int]
    library.stub_set_compute(launch)
    atexit.register(library.stub_set_compute, None)
