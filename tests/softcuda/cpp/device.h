// What ATen asks of CUDA besides kernels: devices, pinned memory and generators of random numbers.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "streams.h"

namespace softcuda {

// The device's random numbers: a CPU generator (Mersenne twister) inside of one that says that it is CUDA's.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device, uint64_t seed = default_rng_seed_val)
      : CPUGeneratorImpl(seed), inner(at::detail::createCPUGenerator(seed)) {
    device_ = Device(kCUDA, device);
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  intrusive_ptr<TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }

  at::Generator inner;
};

at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; i++) generators->push_back(at::Generator(make_intrusive<DeviceGenerator>(i)));
    return generators;
  }();
  return (*all)[device < 0 ? current_device : device];
}

struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  int getNumGPUs() const override { return num_devices(); }
  DeviceIndex current_device() const override { return softcuda::current_device; }
  DeviceIndex getCurrentDevice() const override { return softcuda::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { softcuda::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(softcuda::current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? softcuda::current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::Generator(make_intrusive<DeviceGenerator>(device < 0 ? softcuda::current_device : device));
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, softcuda::current_device); }
  void deviceSynchronize(DeviceIndex device) const override {
    tell("host waits for device", "synchronize", 0, 0);
    finish_device(device);
  }
  std::string showConfig() const override { return "soft device"; }
};

}  // namespace softcuda

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
using softcuda::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
