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
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct Error Error;
typedef struct Input Input;
typedef struct Instance Instance;
typedef struct Model Model;
typedef struct Output Output;
typedef struct Request Request;
typedef struct Response Response;

enum { ERROR_INVALID_ARG = 3, ERROR_UNSUPPORTED = 5 };
enum { MEMORY_CPU = 0, MEMORY_GPU = 2 };
enum { PARAMETER_INT = 1, REQUEST_RELEASE_ALL = 1, RESPONSE_FINAL = 1 };

typedef struct {
  Input* handle;
  int datatype;
  const int64_t* shape;
  uint32_t rank, buffer_count;
  uint64_t size;
} Tensor;

typedef struct {
  void* data;
  int kind;
} Place;

Error* TRITONSERVER_ErrorNew(int code, const char* message);
void TRITONSERVER_ErrorDelete(Error* error);
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

static Error* copy(Place to, Place from, uint64_t size) {
  if (to.kind == MEMORY_GPU || from.kind == MEMORY_GPU)
    return TRITONSERVER_ErrorNew(
        ERROR_UNSUPPORTED, "the demo models read and write memory of the CPU only");
  memmove(to.data, from.data, size); /* a client may give one block for both */
  return NULL;
}

static Error* input_place(
    const Tensor* input, uint32_t buffer, Place* place, uint64_t* size) {
  const void* data = NULL;
  int64_t device;
  TRY(TRITONBACKEND_InputBuffer(
      input->handle, buffer, &data, size, &place->kind, &device));
  place->data = (void*)data;
  return NULL;
}

static Error* output_place(
    Response* response, int datatype, const int64_t* shape, uint32_t rank,
    uint64_t size, Place* place) {
  Output* output;
  int64_t device = 0;
  place->kind = MEMORY_CPU; /* a wish; the server says where it really is */
  TRY(TRITONBACKEND_ResponseOutput(
      response, &output, "OUTPUT__0", datatype, shape, rank));
  return TRITONBACKEND_OutputBuffer(output, &place->data, size, &place->kind, &device);
}

static Error* identity(Response* response, const Tensor* input) {
  Place from, to;
  uint64_t part;
  TRY(output_place(
      response, input->datatype, input->shape, input->rank, input->size, &to));
  for (uint32_t i = 0; i < input->buffer_count; i++) {
    TRY(input_place(input, i, &from, &part));
    TRY(copy(to, from, part));
    to.data = (char*)to.data + part;
  }
  return NULL;
}

static Error* sink(Response* response, const Tensor* input) {
  uint64_t elements = 1, part;
  for (uint32_t i = 0; i < input->rank; i++) elements *= (uint64_t)input->shape[i];
  if (elements == 0 || input->size == 0 || input->size % elements != 0)
    return TRITONSERVER_ErrorNew(
        ERROR_INVALID_ARG, "sink needs at least one element of a fixed-size type");
  const uint64_t width = input->size / elements;
  Place from, to;
  TRY(input_place(input, input->buffer_count - 1, &from, &part));
  if (part < width)
    return TRITONSERVER_ErrorNew(
        ERROR_INVALID_ARG, "the last buffer of the input is smaller than one element");
  from.data = (char*)from.data + (part - width);
  const int64_t one = 1;
  TRY(output_place(response, input->datatype, &one, 1, width, &to));
  return copy(to, from, width);
}

static Error* answer(Request* request, Response* response, bool is_sink) {
  Tensor input;
  const char* name;
  TRY(hold_back(request));
  TRY(TRITONBACKEND_RequestInputByIndex(request, 0, &input.handle));
  TRY(TRITONBACKEND_InputProperties(
      input.handle, &name, &input.datatype, &input.shape, &input.rank, &input.size,
      &input.buffer_count));
  return is_sink ? sink(response, &input) : identity(response, &input);
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
    if (response != NULL)
      drop(TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error));
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
