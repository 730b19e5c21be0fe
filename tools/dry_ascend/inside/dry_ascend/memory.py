"""The chip's memory as arrays, its status register, and what it makes of an overflow."""

import ctypes

import numpy as np

from dry_ascend import library, saturates

# CANN's numbers of types.
DTYPES = {
    0: np.float32,
    1: np.float16,
    2: np.int8,
    3: np.int32,
    4: np.uint8,
    6: np.int16,
    7: np.uint16,
    8: np.uint32,
    9: np.int64,
    10: np.uint64,
    11: np.float64,
    12: np.bool_,
}
TENSOR, SCALAR, LIST = 1, 2, 4
register = np.zeros(8, np.int32)


class Object(ctypes.Structure):
    """An argument of an operator, as in cann.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
        ("offset", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("values", ctypes.c_int64 * 1024),
    )


class Arguments(list):
    """
    What a kernel gets: arrays that lie in the device's memory, numbers and tuples. Of an operator that is compiled when
    it runs, they are its inputs, then its outputs; and it has attributes.
    """

    def __init__(self, values, attributes=None):
        super().__init__(values)
        self._attributes = attributes

    def attribute(self, name, default):
        values = (ctypes.c_double * 16)()
        count = library.stub_attribute(self._attributes, name.encode(), values, len(values))
        if count < 1:
            return default
        return values[0] if count == 1 else tuple(values[:count])


def array(data, dtype, dims, strides=None, offset=0):
    """Returns memory as an array, or None if there is none."""
    dtype = np.dtype(DTYPES[dtype])
    if data is None:
        return None
    if 0 in dims:
        return np.zeros(dims, dtype)
    count = 1 + sum((d - 1) * s for d, s in zip(dims, strides)) if strides else int(np.prod(dims, dtype=np.int64))
    raw = np.frombuffer((ctypes.c_char * ((count + offset) * dtype.itemsize)).from_address(data), dtype)[offset:]
    if strides is None:
        return raw.reshape(dims)
    return np.lib.stride_tricks.as_strided(raw, dims, [stride * dtype.itemsize for stride in strides])


def value_of(address):
    """Returns the argument that an address, or a number in its place, stands for."""
    if address == 0:
        return None
    if not library.stub_is_object(address):
        return address - (1 << 64) if address >= 1 << 63 else address
    its = Object.from_address(address)
    if its.kind == TENSOR:
        return array(its.data, its.type, list(its.dims[: its.rank]), list(its.strides[: its.rank]), its.offset)
    if its.kind == SCALAR:
        return np.frombuffer(ctypes.string_at(ctypes.addressof(its.values), 8), DTYPES[its.type])[0]
    if its.kind == LIST:
        return [value_of(each) for each in its.values[: its.count]]
    return tuple(its.values[: its.count])


def operand(description, buffer):
    """Returns the array that a description and a buffer stand for."""
    its = Object.from_address(description)
    data = Object.from_address(buffer).data or its.data
    if data is None or its.type not in DTYPES:
        return None
    return array(data, its.type, list(its.dims[: its.rank]))


def store(out, value):
    """Writes a result as the chip does. In saturation mode inf becomes the largest number, NaN 0, and both are told."""
    value = np.asarray(value)
    if out.dtype.kind == "f":
        value = value.astype(out.dtype)
        if saturates and not np.isfinite(value).all():
            register[:] = 1
            largest = np.finfo(out.dtype).max
            value = np.where(np.isnan(value), 0, np.clip(value, -largest, largest)).astype(out.dtype)
    out[...] = value.reshape(out.shape) if value.size == out.size else np.broadcast_to(value, out.shape)


def wide(x):
    """Returns float16 as float32, in which the chip computes."""
    return x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float16 else x
