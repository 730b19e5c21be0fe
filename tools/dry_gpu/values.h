// Kernels that decide on branches and loops, computed on few values, so that a step takes the way that it takes on a
// GPU.
#pragma once
#include <string>
#include <vector>

#include "include/runtime/hardware_abstract/device_context/device_context.h"

using Tensors = std::vector<mindspore::device::KernelTensor *>;

// Whether the checks that are launched from now on find an overflow.
void set_overflow(bool value);

// Before a kernel is launched: says that it finds no error, and how long the result of a Range is.
void prepare(const std::string &name, const Tensors &in, const Tensors &workspace, const Tensors &out);

// After it was launched: computes its result, if it is a flag, a comparison, a sum, a selection or the like.
void compute(const std::string &name, const Tensors &in, const Tensors &out);
