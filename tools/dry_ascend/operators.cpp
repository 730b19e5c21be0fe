// Operators: their arguments, their attributes, and their launches, which Python may compute.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "cann.h"

int64_t size_of(int type) {
  static const int sizes[] = {4, 2, 1, 4, 1, 1, 2, 2, 4, 8, 8, 8, 1};
  const int bfloat16 = 27;
  if (type == bfloat16) return 2;
  return type >= 0 && type < 13 ? sizes[type] : 4;
}

// In dataset_queue.cpp.
Status next_batch(int count, void **buffers);

namespace {
std::mutex lock;
std::set<uint64_t> &objects() {
  static auto *all = new std::set<uint64_t>;
  return *all;
}

Object *made(Kind kind) {
  auto *object = new Object();
  object->kind = kind;
  std::lock_guard<std::mutex> held(lock);
  objects().insert(reinterpret_cast<uint64_t>(object));
  return object;
}

template <typename T>
Object *made_list(Kind kind, const T *values, uint64_t count) {
  auto *object = made(kind);
  object->count = count;
  for (uint64_t i = 0; i < count && i < 1024; i++) object->values[i] = (int64_t)values[i];
  return object;
}
}  // namespace

extern "C" {
// ---- arguments ----
int stub_is_object(uint64_t address) {
  std::lock_guard<std::mutex> held(lock);
  return objects().count(address);
}

Object *aclCreateTensor(const int64_t *dims, uint64_t rank, int type, const int64_t *strides, int64_t offset, int,
                        const int64_t *, uint64_t, void *data) {
  auto *tensor = made(TENSOR);
  tensor->type = type;
  tensor->rank = rank;
  tensor->offset = offset;
  tensor->data = data;
  int64_t stride = 1;
  for (int i = static_cast<int>(rank) - 1; i >= 0; i--) {
    tensor->dims[i] = dims[i];
    tensor->strides[i] = strides ? strides[i] : stride;
    stride *= dims[i];
  }
  return tensor;
}
Object *aclCreateScalar(void *value, int type) {
  auto *scalar = made(SCALAR);
  scalar->type = type;
  memcpy(scalar->values, value, size_of(type));
  return scalar;
}
Object *aclCreateIntArray(const int64_t *values, uint64_t count) { return made_list(INTS, values, count); }
Object *aclCreateBoolArray(const bool *values, uint64_t count) { return made_list(BOOLS, values, count); }
Object *aclCreateTensorList(void *const *tensors, uint64_t count) { return made_list(LIST, tensors, count); }
Status aclSetTensorAddr(void *, size_t, Object *tensor, void *data) {
  if (tensor) tensor->data = data;
  return 0;
}
Status aclSetDynamicTensorAddr(void *, size_t, size_t i, Object *list, void *data) {
  if (list) reinterpret_cast<Object *>(list->values[i])->data = data;
  return 0;
}
Object *aclCreateTensorDesc(int type, int rank, const int64_t *dims, int) {
  auto *description = made(DESCRIPTION);
  description->type = type;
  description->rank = rank;
  for (int i = 0; i < rank && i < 8; i++) description->dims[i] = dims[i];
  return description;
}
Status aclSetTensorConst(Object *description, void *data, size_t size) {
  description->data = data;
  description->count = size;
  return 0;
}
Status aclSetTensorShape(Object *, int, const int64_t *) { return 0; }
size_t aclGetTensorDescNumDims(Object *description) { return description->rank; }
Status aclGetTensorDescDimV2(Object *description, size_t i, int64_t *dim) { return answer(dim, description->dims[i]); }
size_t aclGetTensorDescSize(Object *description) {
  int64_t size = size_of(description->type);
  for (int i = 0; i < description->rank; i++) size *= description->dims[i];
  return size;
}
Object *aclCreateDataBuffer(void *data, size_t size) {
  auto *buffer = made(BUFFER);
  buffer->data = data;
  buffer->count = size;
  return buffer;
}
Status aclUpdateDataBuffer(Object *buffer, void *data, size_t size) {
  buffer->data = data;
  buffer->count = size;
  return 0;
}
void *aclGetDataBufferAddr(Object *buffer) { return buffer->data; }
size_t aclDataTypeSize(int type) { return size_of(type); }

// ---- attributes of operators that are compiled when they run: numbers alone ----
using Attributes = std::map<std::string, std::vector<double>>;
Attributes *aclopCreateAttr() { return new Attributes; }
void aclopDestroyAttr(Attributes *attributes) { delete attributes; }
static Status set(Attributes *attributes, const char *name, std::vector<double> values) {
  (*attributes)[name] = std::move(values);
  return 0;
}
Status aclopSetAttrBool(Attributes *all, const char *name, uint8_t value) { return set(all, name, {double(value)}); }
Status aclopSetAttrInt(Attributes *all, const char *name, int64_t value) { return set(all, name, {double(value)}); }
Status aclopSetAttrFloat(Attributes *all, const char *name, float value) { return set(all, name, {value}); }
Status aclopSetAttrListInt(Attributes *all, const char *name, int count, const int64_t *values) {
  return set(all, name, {values, values + count});
}
Status aclopSetAttrListFloat(Attributes *all, const char *name, int count, const float *values) {
  return set(all, name, {values, values + count});
}
// Writes at most so many numbers of an attribute, and returns how many it has; -1: it is not set.
int stub_attribute(Attributes *attributes, const char *name, double *values, int most) {
  if (!attributes || !attributes->count(name)) return -1;
  auto &found = (*attributes)[name];
  for (int i = 0; i < most && i < static_cast<int>(found.size()); i++) values[i] = found[i];
  return found.size();
}

// ---- launches ----
// Computes a launch. `inputs` is 0 for an operator of aclnn, and one more than its inputs for one that is compiled.
using Compute = int (*)(const char *name, int count, int inputs, const uint64_t *arguments, void *attributes);
static Compute compute = nullptr;
void stub_set_compute(Compute function) { compute = function; }

// An operator of aclnn has two functions: the first makes an executor, the second launches it.
constexpr int kMostArguments = 40;
struct Executor {
  uint64_t arguments[kMostArguments];
  int count;
};

// The last two arguments of the first function, whose number only CANN's header tells, are the addresses of a size and
// of an executor: both on the caller's stack, and still zero. `registers` are the six that hold the first arguments,
// and behind them the return address and the arguments on the stack.
Status stub_prepare(uint64_t *registers, const char *name) {
  auto argument = [&](int i) { return registers[i < 6 ? i : i + 1]; };
  uint64_t low = reinterpret_cast<uint64_t>(registers);
  auto zero_on_stack = [&](uint64_t address) {
    bool on_stack = address > low && address < low + (1 << 16) && address % 8 == 0;
    return on_stack && *reinterpret_cast<uint64_t *>(address) == 0;
  };
  auto *executor = new Executor();
  for (int i = 0; i + 2 < kMostArguments; i++) {
    if (zero_on_stack(argument(i)) && zero_on_stack(argument(i + 1))) {
      *reinterpret_cast<Executor **>(argument(i + 1)) = executor;
      executor->count = i;
      return 0;
    }
    executor->arguments[i] = argument(i);
  }
  trace(std::string("NO EXECUTOR ") + name);
  return 1;
}
Status stub_run(void *, uint64_t, Executor *executor, void *, const char *name) {
  trace(std::string("LAUNCH ") + name);
  if (!compute || !executor) return 0;
  return compute(name, executor->count, 0, executor->arguments, nullptr);
}

// ---- operators that are compiled when they run ----
Status aclopCompileAndExecute(const char *name, int inputs, void **in, void **in_data, int outputs, void **out,
                              void **out_data, void *attributes) {
  trace(std::string("ACLOP ") + name);
  if (!strcmp(name, "GetNext")) return next_batch(outputs, out_data);
  if (!compute) return 0;
  std::vector<uint64_t> arguments;
  auto add = [&](int count, void **descriptions, void **buffers) {
    for (int i = 0; i < count; i++) {
      arguments.push_back(reinterpret_cast<uint64_t>(descriptions[i]));
      arguments.push_back(reinterpret_cast<uint64_t>(buffers[i]));
    }
  };
  add(inputs, in, in_data);
  add(outputs, out, out_data);
  return compute(name, arguments.size(), inputs + 1, arguments.data(), attributes);
}
Status aclopCompileAndExecuteV2(const char *name, int inputs, void **in, void **in_data, int outputs, void **out,
                                void **out_data, void *attributes) {
  return aclopCompileAndExecute(name, inputs, in, in_data, outputs, out, out_data, attributes);
}
}
