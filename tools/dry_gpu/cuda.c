// CUDA's runtime and driver without a GPU: memory is the host's, and what is asked for is done at once. What is not
// here is a stub that build.py makes. Only those calls are counted that would cost time on a device.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "calls.h"

#define MEMORY (80ull << 30)
#define MOST_BLOCKS 65536
// Copies within the "device" that are larger are counted, not made: their pages would be the host's.
#define LARGEST_COPIED (1 << 16)
// As CUDA numbers them.
enum { DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };

// ---- memory: the host's ----
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  char *at;
  size_t size;
} blocks[MOST_BLOCKS];
static int used;
static size_t in_use;

int cudaMalloc(void **p, size_t size) {
  size = (size + 4095) & ~4095ull;
  pthread_mutex_lock(&lock);
  int fails = in_use + size > MEMORY || used == MOST_BLOCKS;
  if (!fails) {
    *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fails = *p == MAP_FAILED;
  }
  if (!fails) {
    blocks[used].at = *p;
    blocks[used++].size = size;
    in_use += size;
  }
  pthread_mutex_unlock(&lock);
  if (fails) *p = 0;
  return fails ? 2 : 0;
}

int cudaFree(void *p) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < used; i++)
    if (blocks[i].at == p) {
      munmap(p, blocks[i].size);
      in_use -= blocks[i].size;
      blocks[i] = blocks[--used];
      break;
    }
  pthread_mutex_unlock(&lock);
  return 0;
}

int cudaHostAlloc(void **p, size_t size, unsigned flags) {
  *p = calloc(1, size ? size : 1);
  return *p ? 0 : 2;
}
int cudaFreeHost(void *p) {
  free(p);
  return 0;
}
int cudaHostRegister(void *p, size_t n, unsigned f) { return 0; }
int cudaHostUnregister(void *p) { return 0; }
int cudaMemGetInfo(size_t *free_, size_t *all) {
  *free_ = MEMORY - in_use;
  *all = MEMORY;
  return 0;
}

static int copied(void *to, const void *from, size_t size, int kind) {
  if (kind == DEVICE_TO_DEVICE) {
    CALLED(memcpyDtoD);
  } else if (kind == DEVICE_TO_HOST) {
    CALLED(memcpyDtoH);
  } else {
    CALLED(memcpyHtoD);
  }
  if (kind != DEVICE_TO_DEVICE || size <= LARGEST_COPIED) memmove(to, from, size);
  return 0;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copied(to, from, size, kind); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  return copied(to, from, size, kind);
}
static int filled(void *to, int value, size_t size) {
  CALLED(memset);
  if (size <= LARGEST_COPIED) memset(to, value, size);
  return 0;
}
int cudaMemset(void *to, int value, size_t size) { return filled(to, value, size); }
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) { return filled(to, value, size); }

// ---- the device ----
int cudaGetDeviceCount(int *n) {
  *n = 1;
  return 0;
}
int cudaSetDevice(int i) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaGetLastError(void) { return 0; }
const char *cudaGetErrorName(int e) { return e ? "dry error" : "cudaSuccess"; }
const char *cudaGetErrorString(int e) { return e ? "an error of the dry GPU (out of memory)" : "no error"; }

struct capability {
  int major, minor;
};
static struct capability capability(void) {
  const char *chosen = getenv("DRY_GPU_CAPABILITY");
  if (!chosen || !chosen[0] || !chosen[1]) chosen = "90";
  return (struct capability){chosen[0] - '0', chosen[1] - '0'};
}

// CUDA 11's struct as far as it is filled.
struct properties {
  char name[256], uuid[16], luid[8];
  unsigned mask;
  size_t memory, shared;
  int registers, warp;
  size_t pitch;
  int threads, block[3], grid[3], clock;
  size_t constant;
  int major, minor;
  size_t alignment, texture_pitch;
  int overlap, processors;
};
int cudaGetDeviceProperties(struct properties *p, int i) {
  memset(p, 0, 640);
  strcpy(p->name, "dry GPU");
  p->memory = MEMORY;
  p->shared = 49152;
  p->registers = 65536;
  p->warp = 32;
  p->pitch = 2147483647;
  p->threads = 1024;
  p->block[0] = p->block[1] = 1024;
  p->block[2] = 64;
  p->grid[0] = 2147483647;
  p->grid[1] = p->grid[2] = 65535;
  p->clock = 1980000;
  p->constant = 65536;
  p->major = capability().major;
  p->minor = capability().minor;
  p->alignment = 512;
  p->texture_pitch = 32;
  p->overlap = 1;
  p->processors = 132;
  return 0;
}

// ---- streams and events: all is done when it is asked for ----
static int made(void **p) {
  *p = calloc(1, 256);
  return 0;
}
int cudaStreamCreate(void **p) { return made(p); }
int cudaStreamCreateWithFlags(void **p, unsigned f) { return made(p); }
int cudaStreamCreateWithPriority(void **p, unsigned f, int priority) { return made(p); }
int cudaStreamDestroy(void *p) { return 0; }
int cudaStreamQuery(void *p) { return 0; }
int cudaStreamSynchronize(void *p) { return 0; }
int cudaStreamWaitEvent(void *s, void *e, unsigned f) { return 0; }
int cudaEventCreate(void **p) { return made(p); }
int cudaEventCreateWithFlags(void **p, unsigned f) { return made(p); }
int cudaEventDestroy(void *p) {
  free(p);
  return 0;
}
int cudaEventElapsedTime(float *ms, void *a, void *b) {
  *ms = 0;
  return 0;
}
int cudaEventQuery(void *p) { return 0; }
int cudaEventRecord(void *e, void *s) { return 0; }
int cudaEventSynchronize(void *p) { return 0; }

// ---- the driver ----
// CU_DEVICE_ATTRIBUTE_...
enum { MULTIPROCESSOR_COUNT = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case CAPABILITY_MAJOR:
      *value = capability().major;
      break;
    case CAPABILITY_MINOR:
      *value = capability().minor;
      break;
    case MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    default:
      *value = 1024;
  }
  return 0;
}
int cuGetErrorName(int e, const char **p) {
  *p = "dry";
  return 0;
}
int cuStreamSynchronize(void *p) { return 0; }
int nvrtcVersion(int *major, int *minor) {
  *major = 11;
  *minor = 6;
  return 0;
}

// ---- handles of the libraries ----
#define MADE(name) \
  int name(void **p) { return made(p); }
MADE(cublasCreate_v2)
MADE(cudnnCreate)
MADE(cudnnCreateActivationDescriptor)
MADE(cudnnCreateConvolutionDescriptor)
MADE(cudnnCreateDropoutDescriptor)
MADE(cudnnCreateFilterDescriptor)
MADE(cudnnCreateLRNDescriptor)
MADE(cudnnCreateOpTensorDescriptor)
MADE(cudnnCreatePoolingDescriptor)
MADE(cudnnCreateRNNDescriptor)
MADE(cudnnCreateReduceTensorDescriptor)
MADE(cudnnCreateTensorDescriptor)
MADE(curandCreateGenerator)
MADE(cusolverDnCreate)
MADE(cusolverDnCreateGesvdjInfo)
MADE(cusparseCreate)
MADE(cusparseCreateMatDescr)
MADE(cusparseCreateCsrgemm2Info)
int cufftCreate(int *p) {
  *p = 1;
  return 0;
}

// What sets or gives back something, and costs a device nothing.
#define NOTHING(name) \
  int name(void *p) { return 0; }
NOTHING(cudnnDestroyActivationDescriptor)
NOTHING(cudnnDestroyConvolutionDescriptor)
NOTHING(cudnnDestroyDropoutDescriptor)
NOTHING(cudnnDestroyFilterDescriptor)
NOTHING(cudnnDestroyTensorDescriptor)
NOTHING(cudnnDestroyPoolingDescriptor)
NOTHING(cudnnDestroyOpTensorDescriptor)
NOTHING(cudnnDestroyReduceTensorDescriptor)
NOTHING(cudnnSetStream)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetMathMode)
NOTHING(cudnnSetActivationDescriptor)
NOTHING(cudnnSetOpTensorDescriptor)
NOTHING(cudnnSetReduceTensorDescriptor)
NOTHING(cudnnSetConvolutionMathType)
NOTHING(cudnnSetPoolingNdDescriptor)
NOTHING(cudnnSetDropoutDescriptor)
NOTHING(cudnnRestoreDropoutDescriptor)
NOTHING(cudnnSetConvolutionGroupCount)
NOTHING(curandSetStream)
NOTHING(curandSetPseudoRandomGeneratorSeed)
NOTHING(cusolverDnSetStream)
int cublasGetMathMode(void *h, int *mode) {
  *mode = 0;
  return 0;
}
