// What the soft device offers to its collectives (softnccl.cpp), and how its own parts see each other.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace softcuda {

// Whether hazards are looked for: fresh device memory and results that are not there yet read as NaN, asynchronous
// copies happen when somebody waits for them, and buffers that change while they are being read are reported.
bool is_strict();

// Remember a hazard; the tests read all of them at their end.
void report(std::string hazard);

// Tell the watcher, if there is one, of an event: watch.h.
using Pointers = std::vector<const void*>;
bool is_watched();
void tell(const char* what, const std::string& name, int64_t stream, int64_t subject, const Pointers& read = {},
          const Pointers& written = {});
int64_t current_stream(int64_t device);

// The same bytes as a tensor on the CPU: a view that shares the storage of `tensor`.
at::Tensor cpu_alias(const at::Tensor& tensor);

// FNV-1a over bytes, which tells whether a buffer has changed.
inline uint64_t checksum(const void* bytes, size_t size) {
  uint64_t hash = 1469598103934665603ull;
  for (size_t i = 0; i < size; i++) hash = (hash ^ static_cast<const uint8_t*>(bytes)[i]) * 1099511628211ull;
  return hash;
}

}  // namespace softcuda
