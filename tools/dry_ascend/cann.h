// What the sources of the pretended CANN share. They have the functions that must do more than return 0; build.py makes
// a stub of each other one. Their C++ uses the old ABI of strings, as CANN and MindSpore do.
#pragma once
#include <cstdint>
#include <string>

// What CANN's functions return: 0 is success.
using Status = int;

// Adds a line to the trace, if there is one: a call, a copy or a launch.
extern "C" void stub_trace(const char *line);
inline void trace(const std::string &line) { stub_trace(line.c_str()); }

template <typename T, typename Value>
Status answer(T *where, Value value) {
  *where = value;
  return 0;
}

// Whatever is asked for by a handle that nothing looks into.
inline void *handle() { return new char[256](); }

// An argument of an operator. Python reads it by this layout (inside/dry_ascend/arguments.py).
enum Kind { TENSOR = 1, SCALAR, INTS, LIST, DESCRIPTION, BUFFER, BOOLS, FLOATS };
struct Object {
  int32_t kind, type, rank, unused;
  int64_t dims[8], strides[8], offset;
  void *data;
  int64_t count, values[1024];
};
// Bytes of a value of a type, as CANN numbers types.
int64_t size_of(int type);
