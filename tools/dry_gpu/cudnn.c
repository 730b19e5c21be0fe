// What cuDNN must answer: its descriptors keep what they are told, and its choices are made up.
#include <stddef.h>
#include <string.h>

// ---- cuDNN's descriptors ----
struct descriptor {
  int type, format, count, a[8], b[8], c[8], mode;
};
// cudnnDataType_t begins with float, double, half and int8.
static size_t bytes_of(int type) {
  static const size_t bytes[] = {4, 8, 2, 1};
  return type < 4 ? bytes[type] : 4;
}
static int described(struct descriptor *d, int type, int format, int count, const int *dims, const int *strides) {
  d->type = type;
  d->format = format;
  d->count = count;
  for (int i = count - 1, stride = 1; i >= 0 && count <= 8; stride *= dims[i--]) {
    d->a[i] = dims[i];
    d->b[i] = strides ? strides[i] : stride;
  }
  return 0;
}
static int size_of(struct descriptor *d, size_t *size) {
  *size = bytes_of(d->type);
  for (int i = 0; i < d->count; i++) *size *= d->a[i];
  return 0;
}
int cudnnSetTensor4dDescriptor(void *d, int format, int type, int n, int c, int h, int w) {
  return described(d, type, format, 4, (int[]){n, c, h, w}, 0);
}
int cudnnSetTensorNdDescriptor(void *d, int type, int count, const int *dims, const int *strides) {
  return described(d, type, 0, count, dims, strides);
}
int cudnnSetTensorNdDescriptorEx(void *d, int format, int type, int count, const int *dims) {
  return described(d, type, format, count, dims, 0);
}
int cudnnGetTensorNdDescriptor(struct descriptor *d, int asked, int *type, int *count, int *dims, int *strides) {
  *type = d->type;
  *count = d->count;
  for (int i = 0; i < asked && i < d->count; i++) {
    dims[i] = d->a[i];
    strides[i] = d->b[i];
  }
  return 0;
}
int cudnnGetTensorSizeInBytes(void *d, size_t *size) { return size_of(d, size); }
int cudnnSetFilter4dDescriptor(void *d, int type, int format, int k, int c, int h, int w) {
  return described(d, type, format, 4, (int[]){k, c, h, w}, 0);
}
int cudnnSetFilterNdDescriptor(void *d, int type, int format, int count, const int *dims) {
  return described(d, type, format, count, dims, 0);
}
int cudnnGetFilterNdDescriptor(struct descriptor *d, int asked, int *type, int *format, int *count, int *dims) {
  *type = d->type;
  *format = d->format;
  *count = d->count;
  for (int i = 0; i < asked && i < d->count; i++) dims[i] = d->a[i];
  return 0;
}
int cudnnGetFilterSizeInBytes(void *d, size_t *size) { return size_of(d, size); }
int cudnnSetConvolutionNdDescriptor(struct descriptor *d, int count, const int *pad, const int *stride,
                                    const int *dilation, int mode, int type) {
  d->count = count;
  d->mode = mode;
  d->type = type;
  for (int i = 0; i < count && i < 8; i++) {
    d->a[i] = pad[i];
    d->b[i] = stride[i];
    d->c[i] = dilation[i];
  }
  return 0;
}
int cudnnSetConvolution2dDescriptor(void *d, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int type) {
  return cudnnSetConvolutionNdDescriptor(d, 2, (int[]){ph, pw}, (int[]){sh, sw}, (int[]){dh, dw}, mode, type);
}
int cudnnGetConvolutionNdDescriptor(struct descriptor *d, int asked, int *count, int *pad, int *stride, int *dilation,
                                    int *mode, int *type) {
  *count = d->count;
  *mode = d->mode;
  *type = d->type;
  for (int i = 0; i < asked && i < d->count; i++) {
    pad[i] = d->a[i];
    stride[i] = d->b[i];
    dilation[i] = d->c[i];
  }
  return 0;
}

// ---- choices: the second algorithm, which is deterministic and needs little memory ----
struct choice {
  int algorithm, status;
  float time;
  size_t memory;
  int deterministic, math, reserved[3];
};
static int chosen(int asked, int *returned, struct choice *c) {
  *returned = asked > 0;
  if (asked > 0) {
    memset(c, 0, sizeof *c);
    c->algorithm = 1;
    c->deterministic = 1;
  }
  return 0;
}
#define CHOICE(name)                                                                         \
  int name(void *h, void *a, void *b, void *c, void *d, int asked, int *returned, void *r) { \
    return chosen(asked, returned, r);                                                       \
  }
CHOICE(cudnnFindConvolutionBackwardDataAlgorithm)
CHOICE(cudnnFindConvolutionBackwardFilterAlgorithm)
CHOICE(cudnnFindConvolutionForwardAlgorithm)
CHOICE(cudnnGetConvolutionBackwardDataAlgorithm_v7)
CHOICE(cudnnGetConvolutionBackwardFilterAlgorithm_v7)
CHOICE(cudnnGetConvolutionForwardAlgorithm_v7)

// ---- sizes of workspaces: anything ----
static int some_bytes(size_t *size) {
  *size = 1024;
  return 0;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *s,
                                                             void *a, size_t *size) {
  return some_bytes(size);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz,
                                                      void *dx, void *s, void *a, size_t *size) {
  return some_bytes(size);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *size) {
  return some_bytes(size);
}
int cudnnGetReductionWorkspaceSize(void *h, void *r, void *a, void *c, size_t *size) { return some_bytes(size); }
int cudnnGetReductionIndicesSize(void *h, void *r, void *a, void *c, size_t *size) { return some_bytes(size); }
int cudnnDropoutGetStatesSize(void *h, size_t *size) { return some_bytes(size); }
int cudnnGetRNNParamsSize(void *h, void *r, void *x, size_t *size, int type) { return some_bytes(size); }
int cudnnGetRNNWorkspaceSize(void *h, void *r, int n, void *x, size_t *size) { return some_bytes(size); }
int cudnnGetRNNTrainingReserveSize(void *h, void *r, int n, void *x, size_t *size) { return some_bytes(size); }
int cudnnGetConvolutionBackwardDataWorkspaceSize(void *h, void *a, void *b, void *c, void *d, int algorithm,
                                                 size_t *size) {
  return some_bytes(size);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(void *h, void *a, void *b, void *c, void *d, int algorithm,
                                                   size_t *size) {
  return some_bytes(size);
}
int cudnnGetConvolutionForwardWorkspaceSize(void *h, void *a, void *b, void *c, void *d, int algorithm, size_t *size) {
  return some_bytes(size);
}
const char *cudnnGetErrorString(int e) { return "an error of the dry GPU"; }
