// CUDA devices whose memory is host memory, for a build of torch without CUDA: what the files here share.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/GPUTrace.h>

namespace softcuda {

constexpr int kMostDevices = 8;
constexpr auto kCuda = c10::DeviceType::CUDA;

// As CUDA_VISIBLE_DEVICES says, one if it says nothing; read at every call, because ranks are forked after the library is loaded.
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
c10::StreamId current_stream(c10::DeviceIndex device);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// The allocator may not give the memory away before this stream's work on it is over.
void record_stream(const void* base, c10::StreamId stream);

// The host waits for a stream; every blocking copy and every read of a value does.
void synchronize_stream(c10::StreamId stream);

// Calls `report(interpreter)` where torch.cuda._sanitizer or another reader of torch.cuda._gpu_trace listens.
template <class Report>
void trace(Report report) {
  if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace()) report(**interpreter);
}

}  // namespace softcuda
