/* Demo models without a framework: `identity` copies its input to its output, `sink`
 * answers with the last element of its input.
 *
 * Input is read where it lies (the client's shared memory when it sent a region) and
 * output is written where the server wants it, so a measurement shows the transport
 * and not the model. Element types and shapes are whatever the model's config says.
 * A request parameter `delay_ms` holds the reply back; tests of late replies use it.
 *
 * Only the functions used here are declared, so that no server headers are needed.
 * The server's own library resolves them when it loads this backend.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct Error Error;
typedef struct Input Input;
typedef struct Instance Instance;
typedef struct Model Model;
typedef struct Output Output;
typedef struct Parameter Parameter;
typedef struct Request Request;
typedef struct Response Response;

enum { ERROR_INVALID_ARG = 3, ERROR_UNSUPPORTED = 5 };
enum { MEMORY_CPU = 0, MEMORY_GPU = 2 };
enum { PARAMETER_INT = 1, REQUEST_RELEASE_ALL = 1, RESPONSE_FINAL = 1 };

typedef struct {
  void* data;
  int kind;
  int64_t device;
} Place;

Error* TRITONSERVER_ErrorNew(int code, const char* message);
void TRITONSERVER_ErrorDelete(Error* error);
const char* TRITONSERVER_ParameterName(const Parameter* parameter);
Error* TRITONBACKEND_ModelInstanceModel(Instance* instance, Model** model);
Error* TRITONBACKEND_ModelName(Model* model, const char** name);
Error* TRITONBACKEND_RequestInputByIndex(Request*, uint32_t index, Input** input);
Error* TRITONBACKEND_RequestParameterCount(Request*, uint32_t* count);
Error* TRITONBACKEND_RequestParameter(
    Request*, uint32_t index, const char** key, int* type, const void** value);
Error* TRITONBACKEND_RequestRelease(Request*, uint32_t flags);
Error* TRITONBACKEND_InputProperties(
    Input*, const char** name, int* datatype, const int64_t** shape, uint32_t* rank,
    uint64_t* size, uint32_t* buffer_count);
Error* TRITONBACKEND_InputBuffer(
    Input*, uint32_t index, const void** data, uint64_t* size, int* kind,
    int64_t* device);
Error* TRITONBACKEND_ResponseNew(Response** response, Request*);
Error* TRITONBACKEND_ResponseOutput(
    Response*, Output** output, const char* name, int datatype, const int64_t* shape,
    uint32_t rank);
Error* TRITONBACKEND_OutputBuffer(
    Output*, void** data, uint64_t size, int* kind, int64_t* device);
Error* TRITONBACKEND_ResponseSend(Response*, uint32_t flags, Error* error);
Error* TRITONBACKEND_ModelInstanceReportStatistics(
    Instance*, Request*, bool success, uint64_t start, uint64_t compute_start,
    uint64_t compute_end, uint64_t end);
Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    Instance*, uint64_t batch_size, uint64_t start, uint64_t compute_start,
    uint64_t compute_end, uint64_t end);

#define TRY(call)                       \
  do {                                  \
    Error* error_ = (call);             \
    if (error_ != NULL) return error_;  \
  } while (0)

static void drop(Error* error) {
  if (error != NULL) TRITONSERVER_ErrorDelete(error);
}

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static Error* hold_back(Request* request) {
  uint32_t count = 0;
  TRY(TRITONBACKEND_RequestParameterCount(request, &count));
  for (uint32_t i = 0; i < count; i++) {
    const char* key;
    const void* value;
    int type;
    TRY(TRITONBACKEND_RequestParameter(request, i, &key, &type, &value));
    if (strcmp(key, "delay_ms") != 0 || type != PARAMETER_INT) continue;
    int64_t ms = *(const int64_t*)value;
    if (ms < 0 || ms > 60000)
      return TRITONSERVER_ErrorNew(ERROR_INVALID_ARG, "delay_ms must be 0 to 60000");
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&rest, &rest) != 0) {
    }
  }
  return NULL;
}

/* Memory of a GPU is reached through the driver, opened only when a request needs it. */
static Error* copy_by_driver(void* to, const void* from, uint64_t size, int64_t device) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL)
    return TRITONSERVER_ErrorNew(ERROR_UNSUPPORTED, "libcuda.so.1 cannot be opened");
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
  int (*retain)(void**, int) =
      (int (*)(void**, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
  int (*enter)(void*) = (int (*)(void*))dlsym(driver, "cuCtxSetCurrent");
  int (*copy)(uint64_t, uint64_t, size_t) =
      (int (*)(uint64_t, uint64_t, size_t))dlsym(driver, "cuMemcpy");
  int (*settle)(void) = (int (*)(void))dlsym(driver, "cuCtxSynchronize");
  void* context = NULL;
  if (!init || !retain || !enter || !copy || !settle || init(0) ||
      retain(&context, (int)device) || enter(context) ||
      copy((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, size) || settle())
    return TRITONSERVER_ErrorNew(ERROR_UNSUPPORTED, "copying GPU memory failed");
  return NULL;
}

static Error* copy(Place to, Place from, uint64_t size) {
  if (to.kind == MEMORY_GPU || from.kind == MEMORY_GPU)
    return copy_by_driver(
        to.data, from.data, size, to.kind == MEMORY_GPU ? to.device : from.device);
  memmove(to.data, from.data, size); /* a client may give one block for both */
  return NULL;
}

static Error* output_place(
    Response* response, int datatype, const int64_t* shape, uint32_t rank,
    uint64_t size, Place* place) {
  Output* output;
  TRY(TRITONBACKEND_ResponseOutput(
      response, &output, "OUTPUT__0", datatype, shape, rank));
  return TRITONBACKEND_OutputBuffer(
      output, &place->data, size, &place->kind, &place->device);
}

static Error* identity(
    Response* response, Input* input, int datatype, const int64_t* shape,
    uint32_t rank, uint64_t size, uint32_t buffer_count) {
  Place to = {NULL, MEMORY_CPU, 0};
  TRY(output_place(response, datatype, shape, rank, size, &to));
  for (uint32_t i = 0; i < buffer_count; i++) {
    const void* data;
    Place from = {NULL, MEMORY_CPU, 0};
    uint64_t part;
    TRY(TRITONBACKEND_InputBuffer(
        input, i, &data, &part, &from.kind, &from.device));
    from.data = (void*)data;
    TRY(copy(to, from, part));
    to.data = (char*)to.data + part;
  }
  return NULL;
}

static Error* sink(
    Response* response, Input* input, int datatype, const int64_t* shape,
    uint32_t rank, uint64_t size, uint32_t buffer_count) {
  uint64_t elements = 1;
  for (uint32_t i = 0; i < rank; i++) elements *= (uint64_t)shape[i];
  if (elements == 0 || size == 0 || size % elements != 0 || buffer_count == 0)
    return TRITONSERVER_ErrorNew(
        ERROR_INVALID_ARG, "sink needs at least one element of a fixed-size type");
  const uint64_t width = size / elements;
  const void* data;
  uint64_t part;
  Place from = {NULL, MEMORY_CPU, 0}, to = {NULL, MEMORY_CPU, 0};
  TRY(TRITONBACKEND_InputBuffer(
      input, buffer_count - 1, &data, &part, &from.kind, &from.device));
  if (part < width)
    return TRITONSERVER_ErrorNew(
        ERROR_INVALID_ARG, "the last buffer of the input is smaller than one element");
  from.data = (char*)data + (part - width);
  TRY(output_place(response, datatype, (const int64_t[]){1}, 1, width, &to));
  return copy(to, from, width);
}

static Error* answer(Request* request, Response* response, bool is_sink) {
  Input* input;
  const char* name;
  const int64_t* shape;
  int datatype;
  uint32_t rank, buffer_count;
  uint64_t size;
  TRY(hold_back(request));
  TRY(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  TRY(TRITONBACKEND_InputProperties(
      input, &name, &datatype, &shape, &rank, &size, &buffer_count));
  return (is_sink ? sink : identity)(
      response, input, datatype, shape, rank, size, buffer_count);
}

/* Requests returned with an error stay the server's, so nothing is released then; once
 * this returns NULL every request was answered and released exactly once. */
Error* TRITONBACKEND_ModelInstanceExecute(
    Instance* instance, Request** requests, const uint32_t count) {
  Model* model;
  const char* model_name;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelName(model, &model_name));
  const bool is_sink = strncmp(model_name, "sink", 4) == 0;
  const uint64_t start = now_ns();
  for (uint32_t i = 0; i < count; i++) {
    Response* response = NULL;
    const uint64_t compute_start = now_ns();
    Error* error = TRITONBACKEND_ResponseNew(&response, requests[i]);
    if (error == NULL) error = answer(requests[i], response, is_sink);
    const bool success = error == NULL;
    const uint64_t compute_end = now_ns();
    if (response != NULL) {
      drop(TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error));
    }
    drop(error);
    drop(TRITONBACKEND_ModelInstanceReportStatistics(
        instance, requests[i], success, compute_start, compute_start, compute_end,
        now_ns()));
    drop(TRITONBACKEND_RequestRelease(requests[i], REQUEST_RELEASE_ALL));
  }
  const uint64_t end = now_ns();
  drop(TRITONBACKEND_ModelInstanceReportBatchStatistics(
      instance, count, start, start, end, end));
  return NULL;
}
