// Streams and events. Kernels run at once, in the order of their calls; what is late are asynchronous copies between
// the device and pinned host memory: in strict mode each waits in its stream's queue until somebody waits for it.
//
//   device -> host   The host tensor reads as NaN until its stream, an event after the copy or the device is waited for.
//   host -> device   The bytes are taken at once, and compared when the copy is waited for: a change is a hazard.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <functional>
#include <list>
#include <vector>

#include "memory.h"

namespace softcuda {

int num_devices() {
  static const int number = [] {
    const char* given = getenv("SOFTCUDA_DEVICES");
    return given ? atoi(given) : 2;
  }();
  return number;
}

using StreamKey = std::pair<int64_t, int64_t>;  // device, stream

// The bytes of a tensor: those between its elements count if it is not contiguous.
struct Bytes {
  const char* begin = nullptr;
  const char* end = nullptr;

  Bytes() = default;
  explicit Bytes(const at::Tensor& x) : begin(static_cast<const char*>(x.const_data_ptr())), end(begin) {
    int64_t last = 0;
    for (int64_t i = 0; i < x.dim(); i++) last += (x.size(i) - 1) * x.stride(i);
    if (x.numel()) end = begin + (last + 1) * x.element_size();
  }
  bool meets(const Bytes& other) const { return begin < other.end && other.begin < end; }
};

struct LateCopy {
  uint64_t number;
  std::function<void()> finish;
  Bytes written_host;  // by a copy from the device; empty for one to the device
  Storage host;        // kept alive
};

struct StreamQueue {
  std::list<LateCopy> copies;
  std::map<StreamKey, uint64_t> waits_for;  // other streams, and the number of the last copy of theirs
};

std::recursive_mutex queue_mutex;  // of all that follows
std::map<StreamKey, StreamQueue> queues;
uint64_t last_number = 0;
std::vector<std::string> hazards;
int strict = 0;

bool is_strict() { return strict; }

void report(std::string hazard) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  hazards.push_back(std::move(hazard));
}

// Finish the copies of a stream up to a number, and those of other streams that it waits for.
void finish_stream(StreamKey stream, uint64_t until = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  auto& queue = queues[stream];
  while (!queue.copies.empty() && queue.copies.front().number <= until) {
    auto copy = std::move(queue.copies.front());
    queue.copies.pop_front();
    copy.finish();
  }
  auto others = std::move(queue.waits_for);
  queue.waits_for.clear();
  for (auto& [other, number] : others) finish_stream(other, number);
}

void finish_device(int64_t device) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  for (auto& [stream, queue] : queues)
    if (stream.first == device) finish_stream(stream);
}

// A copy to the device is about to read host memory: no other stream may have yet to write it.
void check_read_of_host(const Bytes& host, StreamKey stream) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  for (auto& [other, queue] : queues)
    for (auto& copy : queue.copies)
      if (other != stream && !queues[stream].waits_for.count(other) && copy.written_host.meets(host))
        report("a copy to the device on stream " + std::to_string(stream.second) + " reads host memory that stream " +
               std::to_string(other.second) + " has yet to write: one of them has to wait for the other");
}

struct Event {
  StreamKey stream;
  uint64_t number;  // of the last copy before it
};

std::atomic<StreamId> next_stream{1};

struct DeviceGuard final : impl::DeviceGuardImplInterface {
  static DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Stream stream_of(DeviceIndex device, StreamId id) { return Stream(Stream::UNSAFE, Device(kCUDA, device), id); }
  static StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  static int64_t number_of(const Stream& stream) { return number_of_stream(stream.device_index(), stream.id()); }

  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    const auto before = current_device;
    setDevice(device);
    return Device(kCUDA, before);
  }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  Stream getStream(Device device) const noexcept override {
    return stream_of(index_of(device), current_streams[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream_of(index_of(device), next_stream++);
  }
  Stream getNewStream(Device device, int) const override { return stream_of(index_of(device), next_stream++); }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto& current = current_streams[stream.device_index()];
    const auto before = stream_of(stream.device_index(), current);
    current = stream.id();
    return before;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Event;
    tell("record event", "", number_of(stream), int64_t(*event));
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    *static_cast<Event*>(*event) = {key_of(stream), last_number};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    tell("stream waits for event", "", number_of(stream), int64_t(event));
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    auto* found = static_cast<Event*>(event);
    auto& number = queues[key_of(stream)].waits_for[found->stream];
    number = std::max(number, found->number);
  }
  // An event that is asked about has always happened: whoever asks may then read what was copied before it.
  bool queryEvent(void* event) const override {
    finish_event(event);
    return true;
  }
  bool queryStream(const Stream& stream) const override {
    finish_stream(key_of(stream));
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const Stream& stream) const override {
    tell("host waits for stream", "Stream.synchronize", number_of(stream), 0);
    finish_stream(key_of(stream));
  }
  void synchronizeEvent(void* event) const override {
    tell("host waits for event", "Event.synchronize", 0, int64_t(event));
    finish_event(event);
  }
  static void finish_event(void* event) {
    if (!event) return;
    auto* found = static_cast<Event*>(event);
    finish_stream(found->stream, found->number);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    tell("host waits for device", "synchronize", 0, 0);
    finish_device(device);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    tell("use on stream", "", number_of(stream), int64_t(data.get()));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard);

}  // namespace softcuda
