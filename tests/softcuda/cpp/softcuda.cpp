// A CUDA device in host memory, for a CPU-only build of torch. One translation unit, since torch's headers take most of
// the time to compile. Loaded before `import torch`, so that torch finds its CUDA hooks when it looks for them.
#include "operators.h"

namespace softcuda {
struct Start {
  Start() {
    SetAllocator(kCUDA, &device_allocator, 10);
    SetCPUAllocator(&cpu_allocator, 100);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_math_attention);
  }
} start;
}  // namespace softcuda

// What tests/softcuda/library.py calls.
extern "C" {
int soft_get_device() { return softcuda::current_device; }
void soft_set_device(int device) { softcuda::current_device = device; }
int64_t soft_allocated(int device) { return softcuda::statistics[device].allocated; }
int64_t soft_peak(int device) { return softcuda::statistics[device].peak; }
int64_t soft_allocations(int device) { return softcuda::statistics[device].allocations; }
void soft_reset_peak(int device) { softcuda::statistics[device].peak = softcuda::statistics[device].allocated.load(); }
void soft_set_limit(int device, int64_t bytes) { softcuda::statistics[device].limit = bytes; }
void soft_set_strict(int on) { softcuda::strict = on; }
int soft_num_hazards() { return softcuda::hazards.size(); }
const char* soft_hazard(int i) { return softcuda::hazards[i].c_str(); }
void soft_forget_hazards() { softcuda::hazards.clear(); }
void soft_synchronize(int device) {
  softcuda::tell("host waits for device", "torch.cuda.synchronize", 0, 0);
  softcuda::finish_device(device);
}
void soft_watch(softcuda::Watcher watcher) { softcuda::watcher = watcher; }
void soft_enter_kernel() { softcuda::kernels_entered++; }
void soft_leave_kernel() { softcuda::kernels_entered--; }
}
