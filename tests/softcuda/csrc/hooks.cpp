// What torch's CPU code asks a CUDA build: whether there are devices, their pinned memory and their generators.
#include "random.h"
#include "soft.h"

#include <ATen/detail/CUDAHooksInterface.h>

namespace at {

struct SoftCUDAHooks final : CUDAHooksInterface {
  explicit SoftCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return softcuda::device_count() > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return hasCUDA(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return softcuda::device_count(); }
  DeviceIndex deviceCount() const override { return softcuda::device_count(); }
  DeviceIndex current_device() const override { return softcuda::current_device(); }
  DeviceIndex getCurrentDevice() const override { return softcuda::current_device(); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, softcuda::current_device()); }
  bool isPinnedPtr(const void* data) const override { return softcuda::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return softcuda::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return softcuda::device_allocator(); }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return softcuda::default_generator(device); }
  Generator getNewGenerator(DeviceIndex device) const override { return softcuda::new_generator(device); }
  void deviceSynchronize(DeviceIndex) const override {
    softcuda::trace([](auto& to) { to.trace_gpu_device_synchronization(DeviceType::CUDA); });
  }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SoftCUDAHooks)  // torch asks for this name

}  // namespace at
