// A device whose memory is the host's, and whose work is done when it is asked for.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "cann.h"

extern "C" {
// What stubs return that must return an object.
char stub_object[1 << 16];

// ---- the trace: in a file, or kept for Python ----
static std::mutex lock;
static bool keeps = false;
static std::string kept, taken;
void stub_trace(const char *line) {
  static FILE *file = [] {
    const char *path = getenv("DRY_ASCEND_TRACE");
    return path ? fopen(path, "a") : nullptr;
  }();
  if (file) {
    fprintf(file, "%s\n", line);
    fflush(file);
  }
  std::lock_guard<std::mutex> held(lock);
  if (keeps) kept.append(line).append("\n");
}
// Returns what was traced since it was last called. The first call only begins.
const char *stub_take_trace() {
  std::lock_guard<std::mutex> held(lock);
  keeps = true;
  taken = std::move(kept);
  kept.clear();
  return taken.c_str();
}

// ---- the chip ----
const char *aclrtGetSocName() {
  const char *chosen = getenv("DRY_ASCEND_SOC");
  return chosen ? chosen : "Ascend910B2";
}
Status aclrtGetDevice(int *device) { return answer(device, 0); }
Status aclrtGetDeviceCount(uint32_t *count) { return answer(count, 1); }
Status aclrtGetRunMode(int *mode) { return answer(mode, 1); }
Status aclrtSetDeviceSatMode(int mode) {
  trace("aclrtSetDeviceSatMode " + std::to_string(mode));
  return 0;
}

// ---- contexts, streams, events ----
static thread_local void *current = nullptr;
Status aclrtCreateContext(void **context, int) { return answer(context, handle()); }
Status aclrtSetCurrentContext(void *context) { return answer(&current, context); }
Status aclrtGetCurrentContext(void **context) {
  static void *first = handle();
  return answer(context, current ? current : first);
}
Status aclrtCreateStream(void **stream) { return answer(stream, handle()); }
Status aclrtCreateStreamWithConfig(void **stream, uint32_t, uint32_t) { return answer(stream, handle()); }
Status aclrtStreamQuery(void *, int *status) { return answer(status, 0); }
Status aclrtGetStreamId(void *, int *id) { return answer(id, 0); }
Status aclrtDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 7;
  *greatest = 0;
  return 0;
}
Status aclrtCreateEvent(void **event) { return answer(event, handle()); }
Status aclrtCreateEventWithFlag(void **event, uint32_t) { return answer(event, handle()); }
Status aclrtCreateEventExWithFlag(void **event, uint32_t) { return answer(event, handle()); }
Status aclrtEventElapsedTime(float *ms, void *, void *) { return answer(ms, 0); }
Status aclrtQueryEventStatus(void *, int *status) { return answer(status, 1); }
// MindSpore's thread calls it in a loop.
Status aclrtProcessReport(int) {
  usleep(100000);
  return 0;
}

// ---- memory ----
Status aclrtGetMemInfo(int, size_t *free, size_t *total) {
  *free = 6ull << 30;
  *total = 8ull << 30;
  return 0;
}
Status aclrtMalloc(void **p, size_t size, int) {
  *p = mmap(nullptr, size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *p == MAP_FAILED;
}
Status aclrtMallocAlign32(void **p, size_t size, int policy) { return aclrtMalloc(p, size, policy); }
Status aclrtReserveMemAddress(void **p, size_t size, size_t, void *, uint64_t) { return aclrtMalloc(p, size, 0); }
Status aclrtMallocPhysical(void **physical, size_t, const void *, uint64_t) { return answer(physical, handle()); }
Status aclrtMallocHost(void **p, size_t size) { return posix_memalign(p, 64, size + 64) ? 1 : 0; }
Status aclrtFreeHost(void *p) {
  free(p);
  return 0;
}
Status aclrtMemset(void *to, size_t, int value, size_t size) {
  memset(to, value, size);
  return 0;
}
Status aclrtMemsetAsync(void *to, size_t, int value, size_t size, void *) {
  memset(to, value, size);
  return 0;
}
static Status copied(const std::string &how, void *to, const void *from, size_t size, int kind) {
  static const char *directions[] = {"H2H", "H2D", "D2H", "D2D"};
  trace(how + " " + (kind >= 0 && kind < 4 ? directions[kind] : "?") + " " + std::to_string(size));
  memcpy(to, from, size);
  return 0;
}
Status aclrtMemcpy(void *to, size_t, const void *from, size_t size, int kind) {
  return copied("MEMCPY SYNC", to, from, size, kind);
}
Status aclrtMemcpyAsync(void *to, size_t, const void *from, size_t size, int kind, void *) {
  return copied("MEMCPY", to, from, size, kind);
}

// ---- texts: empty ----
const char *aclGetRecentErrMsg() { return ""; }
// ge::AscendString::GetString() const
const char *_ZNK2ge12AscendString9GetStringEv() { return ""; }
// ge::StatusFactory::Instance(), whose only member is a map
void *_ZN2ge13StatusFactory8InstanceEv() {
  static auto *instance = new std::map<uint32_t, std::string>[4];
  return instance;
}
}
