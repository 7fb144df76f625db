// What happens on the devices, told as it happens to a watcher in Python: tests/softcuda/watch.py says what it is told.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "softcuda.h"

namespace softcuda {
using namespace c10;

constexpr int kMaxDevices = 16;

thread_local StreamId current_streams[kMaxDevices];
thread_local int kernels_entered = 0;  // what a kernel that is written in Python does is a part of this kernel

using Watcher = void (*)(const char* what, const char* name, int64_t stream, int64_t subject, const void* const* memory,
                         int num_read, int num_written);
std::atomic<Watcher> watcher{nullptr};

std::mutex freed_mutex;
Pointers freed;  // and not yet told: memory is freed while Python handles an exception, too, when it cannot be called

bool is_watched() { return watcher.load() != nullptr; }

int64_t number_of_stream(int64_t device, int64_t stream) { return device << 32 | stream; }
int64_t current_stream(int64_t device) { return number_of_stream(device, current_streams[device]); }

void tell(const char* what, const std::string& name, int64_t stream, int64_t subject, const Pointers& read,
          const Pointers& written) {
  auto told = watcher.load();
  if (!told) return;
  Pointers before;
  {
    std::lock_guard<std::mutex> lock(freed_mutex);
    before.swap(freed);
  }
  for (auto* pointer : before) told("free", "", 0, int64_t(pointer), nullptr, 0, 0);
  auto memory = read;
  memory.insert(memory.end(), written.begin(), written.end());
  told(what, name.c_str(), stream, subject, memory.data(), read.size(), written.size());
}

// Memory is freed: told with the next event.
void tell_free(const void* pointer) {
  if (!is_watched()) return;
  std::lock_guard<std::mutex> lock(freed_mutex);
  freed.push_back(pointer);
}

// A kernel is launched on the current stream of its device.
void tell_kernel(const std::string& name, int64_t device, const Pointers& read, const Pointers& written) {
  if (!kernels_entered) tell("kernel", name, current_stream(device), 0, read, written);
}

// The host waits until the current stream of the device has come to its end.
void tell_wait(const std::string& reason, int64_t device) {
  if (!kernels_entered) tell("host waits for stream", reason, current_stream(device), 0);
}

}  // namespace softcuda
