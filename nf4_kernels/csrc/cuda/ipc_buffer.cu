// IPC buffers made, opened by other processes, asked and given back.
#include <stddef.h>
#include <string.h>

#include "ipc_buffer.cuh"

// An IPC buffer of this rank on the current device, with slots for the LL128 protocol or without, and the handle (64 bytes)
// with which other processes open it.
NF4_EXPORT int nf4_cuda_ipc_buffer_create(int32_t ranks, int32_t ll128, void** buffer, char* handle) {
  if (ranks < 2 || ranks > NF4_MAX_RANKS) return cudaErrorInvalidValue;
  size_t bytes = nf4::ipc_buffer_bytes(ranks, ll128 != 0);
  cudaError_t status = cudaMalloc(buffer, bytes);
  if (status != cudaSuccess) return status;
  cudaIpcMemHandle_t made;
  nf4::IpcBufferHeader empty{};
  empty.hung_rank = -1;
  empty.timeout_ns = UINT64_MAX;
  status = cudaMemset(*buffer, 0, bytes);
  if (status == cudaSuccess) status = cudaMemcpy(*buffer, &empty, sizeof(empty), cudaMemcpyHostToDevice);
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  if (status == cudaSuccess) status = cudaIpcGetMemHandle(&made, *buffer);
  if (status != cudaSuccess) {
    cudaFree(*buffer);
    return status;
  }
  static_assert(sizeof(made) == NF4_IPC_HANDLE_BYTES, "");
  memcpy(handle, &made, sizeof(made));
  return cudaSuccess;
}

NF4_EXPORT int nf4_cuda_ipc_buffer_free(void* buffer) { return cudaFree(buffer); }

// Another process's IPC buffer, as this process's current device reaches it.
NF4_EXPORT int nf4_cuda_ipc_buffer_open(const char* handle, void** buffer) {
  cudaIpcMemHandle_t given;
  memcpy(&given, handle, sizeof(given));
  cudaError_t status = cudaIpcOpenMemHandle(buffer, given, cudaIpcMemLazyEnablePeerAccess);
  // The error is returned, so it must not be found again as CUDA's last error.
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

NF4_EXPORT int nf4_cuda_ipc_buffer_close(void* buffer) { return cudaIpcCloseMemHandle(buffer); }

// Whether the current device reaches all others that this process sees over NVLink, which is where atomics are native.
NF4_EXPORT int nf4_cuda_is_linked(int32_t* linked) {
  int device = 0, count = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaGetDeviceCount(&count);
  *linked = count > 1;
  for (int other = 0; other < count && status == cudaSuccess; ++other) {
    int native = 1;
    if (other != device) status = cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported, device, other);
    if (native == 0) *linked = 0;
  }
  return status;
}

// Sets how long launches that begin from here on wait for a rank. Do not call it while a graph is captured.
NF4_EXPORT int nf4_cuda_ipc_buffer_set_timeout(void* buffer, uint64_t ns) {
  return cudaMemcpy(static_cast<char*>(buffer) + offsetof(nf4::IpcBufferHeader, timeout_ns), &ns, sizeof(ns),
                    cudaMemcpyHostToDevice);
}

// Finds a rank for which a launch has waited too long, or -1. Waits for the launches that are under way.
NF4_EXPORT int nf4_cuda_ipc_buffer_hung_rank(void* buffer, int32_t* rank) {
  return cudaMemcpy(rank, static_cast<char*>(buffer) + offsetof(nf4::IpcBufferHeader, hung_rank), sizeof(*rank),
                    cudaMemcpyDeviceToHost);
}
