// Memory of the soft GPUs: host memory, counted for each device as CUDA's caching allocator would count it.
//
// A header in front of each block says whose bytes follow. CPU kernels allocate their results by torch's CPU allocator,
// which is replaced: while a kernel runs for a device, what it takes counts as that device's.
#pragma once
#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "watch.h"

namespace softcuda {
constexpr int kHost = kMaxDevices;  // its statistics come after the devices'
constexpr size_t kHeaderBytes = 64;
constexpr size_t kBlockBytes = 512;  // CUDA's caching allocator rounds up to this

thread_local DeviceIndex current_device = 0;
thread_local int kernel_device = kHost;  // whose kernel runs in this thread

struct Statistics {
  std::atomic<int64_t> allocated{0}, peak{0}, limit{0}, allocations{0};
};
Statistics statistics[kMaxDevices + 1];

struct Header {
  size_t bytes;
  int64_t device;
};

Header* header_of(void* pointer) { return reinterpret_cast<Header*>(static_cast<char*>(pointer) - kHeaderBytes); }

void* allocate(size_t bytes, int device) {
  auto& own = statistics[device];
  const size_t rounded = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  if (own.limit && own.allocated + int64_t(rounded) > own.limit)
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes on soft GPU ",
                     device, ", where ", own.allocated.load(), " of ", own.limit.load(), " are in use.");
  void* block = nullptr;
  TORCH_CHECK(posix_memalign(&block, 64, kHeaderBytes + rounded + 64) == 0, "soft device: host memory is full");
  *static_cast<Header*>(block) = {rounded, device};
  const int64_t now = own.allocated += rounded;
  int64_t peak = own.peak;
  while (now > peak && !own.peak.compare_exchange_weak(peak, now)) {
  }
  own.allocations++;
  void* pointer = static_cast<char*>(block) + kHeaderBytes;
  if (device != kHost && is_watched()) tell("allocate", "", current_stream(device), int64_t(pointer));
  if (device != kHost && is_strict()) memset(pointer, 0xff, bytes);
  return pointer;
}

void deallocate(void* pointer) {
  if (!pointer) return;
  auto* header = header_of(pointer);
  statistics[header->device].allocated -= header->bytes;
  if (header->device != kHost) tell_free(pointer);
  free(header);
}

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? softcuda::allocate(bytes, current_device) : nullptr;
    return {pointer, pointer, &deallocate, Device(kCUDA, current_device)};
  }
  DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} device_allocator;

struct CPUAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? softcuda::allocate(bytes, kernel_device) : nullptr;
    return {pointer, pointer, &deallocate, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} cpu_allocator;

// Pinned host memory: plain memory in a register, so that copies know which host tensors CUDA would not wait for.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;

void unpin(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<char*>(pointer));
  }
  free(pointer);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto block = pinned_blocks.upper_bound(static_cast<const char*>(pointer));
  if (block == pinned_blocks.begin()) return false;
  --block;
  return static_cast<const char*>(pointer) < block->first + block->second;
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, bytes + 64) == 0, "soft device: host memory is full");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<char*>(pointer)] = bytes + 1;  // an empty tensor is pinned, too
    return {pointer, pointer, &unpin, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_allocator;

// While it lives, allocations of this thread's CPU kernels are the device's.
struct KernelOf {
  int before = kernel_device;
  explicit KernelOf(int device) { kernel_device = device; }
  ~KernelOf() { kernel_device = before; }
};

// While it lives, this thread's current device is another one; -1 leaves it.
struct OnDevice {
  DeviceIndex before = current_device;
  explicit OnDevice(DeviceIndex device) {
    if (device >= 0) current_device = device;
  }
  ~OnDevice() { current_device = before; }
};

}  // namespace softcuda
