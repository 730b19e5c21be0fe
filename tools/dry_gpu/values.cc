#include "values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>

using namespace mindspore;
using device::KernelTensor;
using Values = std::vector<double>;

namespace {
constexpr size_t kMostValues = 64;
bool overflow = false;

// Calls `visit` with a pointer of the type of a tensor's values. Returns false if that is a type which decides nothing.
template <typename Visit>
bool with_type(TypeId type, void *data, Visit visit) {
  switch (type) {
    case kNumberTypeBool:
      visit(static_cast<bool *>(data));
      return true;
    case kNumberTypeInt32:
      visit(static_cast<int32_t *>(data));
      return true;
    case kNumberTypeInt64:
      visit(static_cast<int64_t *>(data));
      return true;
    case kNumberTypeFloat32:
      visit(static_cast<float *>(data));
      return true;
    case kNumberTypeFloat64:
      visit(static_cast<double *>(data));
      return true;
    default:
      return false;
  }
}

// Returns how many values a tensor of few values has, else 0.
template <typename T>
size_t few(KernelTensor *tensor, T *) {
  size_t count = tensor->size() / sizeof(T);
  return count <= kMostValues ? count : 0;
}

// Appends a tensor's values. Returns false if it has many, none, or some of another type.
bool read(KernelTensor *tensor, Values *values) {
  if (!tensor || !tensor->device_ptr()) return false;
  size_t before = values->size();
  with_type(tensor->dtype_id(), tensor->device_ptr(),
            [&](auto *data) { values->insert(values->end(), data, data + few(tensor, data)); });
  return values->size() > before;
}

// Writes values into a tensor of few values; a single one fills it.
void write(KernelTensor *tensor, const Values &values) {
  if (!tensor || !tensor->device_ptr() || values.empty()) return;
  with_type(tensor->dtype_id(), tensor->device_ptr(), [&](auto *data) {
    for (size_t i = 0, count = few(tensor, data); i < count; i++) {
      data[i] = values[values.size() == 1 ? 0 : std::min(i, values.size() - 1)];
    }
  });
}

const std::map<std::string, std::function<double(double)>> kOfOne = {
    {"Sqrt", [](double a) { return std::sqrt(a); }},
    {"Square", [](double a) { return a * a; }},
    {"LogicalNot", [](double a) { return a == 0; }},
    {"Neg", [](double a) { return -a; }},
    {"Reciprocal", [](double a) { return 1 / a; }},
    {"Inv", [](double a) { return 1 / a; }},
    {"Cast", [](double a) { return a; }},
    {"Reshape", [](double a) { return a; }},
    {"Identity", [](double a) { return a; }},
    {"TensorMove", [](double a) { return a; }},
    {"Load", [](double a) { return a; }},
};

const std::map<std::string, std::function<double(double, double)>> kOfTwo = {
    {"Equal", [](double a, double b) { return a == b; }},
    {"NotEqual", [](double a, double b) { return a != b; }},
    {"Less", [](double a, double b) { return a < b; }},
    {"LessEqual", [](double a, double b) { return a <= b; }},
    {"Greater", [](double a, double b) { return a > b; }},
    {"GreaterEqual", [](double a, double b) { return a >= b; }},
    {"LogicalAnd", [](double a, double b) { return a != 0 && b != 0; }},
    {"LogicalOr", [](double a, double b) { return a != 0 || b != 0; }},
    {"Add", [](double a, double b) { return a + b; }},
    {"AddV2", [](double a, double b) { return a + b; }},
    {"AssignAdd", [](double a, double b) { return a + b; }},
    {"Sub", [](double a, double b) { return a - b; }},
    {"Mul", [](double a, double b) { return a * b; }},
    {"RealDiv", [](double a, double b) { return a / b; }},
    {"Div", [](double a, double b) { return a / b; }},
    {"Maximum", [](double a, double b) { return std::fmax(a, b); }},
    {"Minimum", [](double a, double b) { return std::fmin(a, b); }},
    {"FloorMod", [](double a, double b) { return b ? a - b * std::floor(a / b) : 0; }},
    {"Mod", [](double a, double b) { return b ? a - b * std::floor(a / b) : 0; }},
    {"FloorDiv", [](double a, double b) { return std::floor(a / b); }},
};

const std::map<std::string, std::function<double(const Values &)>> kReductions = {
    {"ReduceAll", [](const Values &a) { return std::all_of(a.begin(), a.end(), [](double v) { return v != 0; }); }},
    {"ReduceAny", [](const Values &a) { return std::any_of(a.begin(), a.end(), [](double v) { return v != 0; }); }},
    {"ReduceMax", [](const Values &a) { return *std::max_element(a.begin(), a.end()); }},
    {"ReduceMin", [](const Values &a) { return *std::min_element(a.begin(), a.end()); }},
    {"ReduceSum", [](const Values &a) { return std::accumulate(a.begin(), a.end(), 0.0); }},
    {"ReduceMean", [](const Values &a) { return std::accumulate(a.begin(), a.end(), 0.0) / a.size(); }},
};

// What a reduction of more values than are read comes to, if something overflowed, and if not.
const std::map<std::string, std::pair<double, double>> kOfMany = {
    {"ReduceSum", {NAN, 1}},
    {"ReduceAll", {0, 1}},
    {"ReduceAny", {0, 0}},
};

Values selected(const Values &condition, const Values &yes, const Values &no) {
  Values result;
  size_t count = std::max({condition.size(), yes.size(), no.size()});
  for (size_t i = 0; i < count; i++) {
    bool taken = condition[i % condition.size()] != 0;
    result.push_back(taken ? yes[i % yes.size()] : no[i % no.size()]);
  }
  return result;
}

// The result of a kernel whose first input was read, empty if it is not known.
Values result_of(const std::string &name, const Tensors &in, const Values &first) {
  Values result, second, third;
  if (auto found = kOfOne.find(name); found != kOfOne.end()) {
    for (double each : first) result.push_back(found->second(each));
  } else if (auto found = kReductions.find(name); found != kReductions.end()) {
    result = {found->second(first)};
  } else if (name == "Stack" || name == "Pack" || name == "Concat") {
    for (auto *each : in) {
      if (!read(each, &result)) break;
    }
  } else if (name == "AddN") {
    double sum = 0;
    for (auto *each : in) {
      Values values;
      if (read(each, &values)) sum += values[0];
    }
    result = {sum};
  } else if (name == "Select" && in.size() > 2 && read(in[1], &second) && read(in[2], &third)) {
    result = selected(first, second, third);
  } else if (auto found = kOfTwo.find(name); found != kOfTwo.end() && in.size() > 1 && read(in[1], &second)) {
    for (size_t i = 0; i < std::max(first.size(), second.size()); i++) {
      result.push_back(found->second(first[i % first.size()], second[i % second.size()]));
    }
  }
  return result;
}
// Of single values.
void unstack(const Values &values, const Tensors &out) {
  for (size_t i = 0; i < out.size() && out.size() == values.size(); i++) write(out[i], {values[i]});
}
}  // namespace

void set_overflow(bool value) { overflow = value; }

void prepare(const std::string &name, const Tensors &in, const Tensors &workspace, const Tensors &out) {
  for (auto *each : workspace) {
    if (each && each->device_ptr() && each->size() <= 64) memset(each->device_ptr(), 0, each->size());
  }
  Values start, limit, delta, values;
  if (name != "Range" || in.size() < 3) return;
  if (!read(in[0], &start) || !read(in[1], &limit) || !read(in[2], &delta) || delta[0] == 0) return;
  int64_t count = std::ceil((limit[0] - start[0]) / delta[0]);
  for (auto *each : workspace) {
    if (each && each->device_ptr() && each->size() == sizeof count) memcpy(each->device_ptr(), &count, sizeof count);
  }
  for (int64_t i = 0; i < std::min<int64_t>(count, kMostValues); i++) values.push_back(start[0] + i * delta[0]);
  if (!out.empty()) write(out[0], values);
}

void compute(const std::string &name, const Tensors &in, const Tensors &out) {
  if (out.empty() || !out[0]) return;
  if (name == "FloatStatus" || name == "AllFinite") return write(out[0], {overflow ? 1.0 : 0.0});
  if (name == "IsFinite") return write(out[0], {overflow ? 0.0 : 1.0});
  if (in.empty()) return;
  Values first;
  if (read(in[0], &first)) {
    if (name == "Unstack") return unstack(first, out);
    Values result = result_of(name, in, first);
    if (name == "AssignAdd") write(in[0], result);
    write(out[0], result);
  } else if (auto found = kOfMany.find(name); found != kOfMany.end()) {
    write(out[0], {overflow ? found->second.first : found->second.second});
  }
}
