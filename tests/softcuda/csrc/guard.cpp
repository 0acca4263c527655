// The device guard: devices, streams and events are numbers. Work is done when it is asked for, so nothing ever waits; who waits for
// whom is reported as the guard of a CUDA build reports it.
#include "soft.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

namespace softcuda {
namespace {

thread_local c10::DeviceIndex device_now = 0;
thread_local c10::StreamId stream_now[kMostDevices] = {0};
std::atomic<int64_t> streams_made{0};

uintptr_t handle(void* event) { return reinterpret_cast<uintptr_t>(event); }

void choose(c10::Device device) {
  if (device.index() < 0) return;
  TORCH_CHECK(device.index() < device_count(), "invalid device ordinal: cuda:", int(device.index()));
  device_now = device.index();
}

c10::Device indexed(c10::Device device) {
  return c10::Device(kCuda, device.index() < 0 ? device_now : device.index());
}

struct SoftGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kCuda, device_now);
    choose(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kCuda, device_now); }
  void setDevice(c10::Device device) const override { choose(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    auto where = indexed(device);
    return c10::Stream(c10::Stream::UNSAFE, where, stream_now[where.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    c10::Stream made(c10::Stream::UNSAFE, indexed(device), ++streams_made);
    trace([&](auto& to) { to.trace_gpu_stream_creation(kCuda, made.id()); });
    return made;
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& now = stream_now[stream.device_index()];
    c10::Stream before(c10::Stream::UNSAFE, stream.device(), now);
    now = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    trace([&](auto& to) { to.trace_gpu_device_synchronization(kCuda); });
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new char;
      trace([&](auto& to) { to.trace_gpu_event_creation(kCuda, handle(*event)); });
    }
    trace([&](auto& to) { to.trace_gpu_event_record(kCuda, handle(*event), stream.id()); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    trace([&](auto& to) { to.trace_gpu_event_wait(kCuda, handle(event), stream.id()); });
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    trace([&](auto& to) { to.trace_gpu_event_synchronization(kCuda, handle(event)); });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    trace([&](auto& to) { to.trace_gpu_event_deletion(kCuda, handle(event)); });
    delete static_cast<char*>(event);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), stream.id());
  }
};

const SoftGuard guard;

}  // namespace

c10::DeviceIndex device_count() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return 1;
  std::string names(visible);
  auto count = names.empty() ? 0 : std::count(names.begin(), names.end(), ',') + 1;
  return static_cast<c10::DeviceIndex>(std::min<int64_t>(count, kMostDevices));
}

c10::DeviceIndex current_device() { return device_now; }
c10::StreamId current_stream(c10::DeviceIndex device) { return stream_now[device]; }

void synchronize_stream(c10::StreamId stream) {
  trace([&](auto& to) { to.trace_gpu_stream_synchronization(kCuda, stream); });
}

}  // namespace softcuda

extern "C" void softcuda_install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&softcuda::guard);
}
extern "C" int softcuda_device_count() { return softcuda::device_count(); }
