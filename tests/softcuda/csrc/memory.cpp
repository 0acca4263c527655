// Memory of soft devices and pinned memory. New memory holds NaN for every float type: what nobody wrote shows.
#include "soft.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace softcuda {
namespace {

constexpr size_t kAlignment = 64;

struct Block {
  size_t bytes;
  c10::StreamId stream;                // that was current when it was allocated: the next owner works on that one
  std::set<c10::StreamId> also_used;  // of record_stream
};

// Never destroyed: tensors of interpreter globals are freed after static objects.
std::mutex& lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::map<const void*, Block>& blocks() {
  static auto* found = new std::map<const void*, Block>;
  return *found;
}
std::map<const void*, size_t>& pinned() {
  static auto* found = new std::map<const void*, size_t>;
  return *found;
}
int64_t allocated = 0, most_allocated = 0;

void* filled(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, kAlignment, bytes) == 0, "no host memory for ", bytes, " bytes");
  return std::memset(data, 0xFF, bytes);
}

void free_device(void* data) {
  trace([&](auto& to) { to.trace_gpu_memory_deallocation(kCuda, reinterpret_cast<uintptr_t>(data)); });
  std::lock_guard<std::mutex> held(lock());
  auto found = blocks().find(data);
  allocated -= static_cast<int64_t>(found->second.bytes);
  blocks().erase(found);
  std::free(data);
}

void free_pinned(void* data) {
  std::lock_guard<std::mutex> held(lock());
  pinned().erase(data);
  // torch waits for copies before it reuses pinned memory, and reports neither: readers of the trace would take the next tensor there
  // for this one.
  if (c10::impl::GPUTrace::get_trace() == nullptr) std::free(data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kCuda, current_device());
    if (bytes == 0) return {nullptr, nullptr, &free_device, device};
    void* data = filled(bytes);
    {
      std::lock_guard<std::mutex> held(lock());
      blocks()[data] = {bytes, current_stream(device.index()), {}};
      allocated += static_cast<int64_t>(bytes);
      most_allocated = std::max(most_allocated, allocated);
    }
    trace([&](auto& to) { to.trace_gpu_memory_allocation(kCuda, reinterpret_cast<uintptr_t>(data)); });
    return {data, data, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::DeviceType::CPU};
    void* data = filled(bytes);
    std::lock_guard<std::mutex> held(lock());
    pinned()[data] = bytes;
    return {data, data, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;
const bool registered = (c10::SetAllocator(kCuda, &device_memory, 1), true);

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(lock());
  auto after = pinned().upper_bound(data);
  if (after == pinned().begin()) return false;
  auto [start, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < static_cast<const char*>(start) + bytes;
}

void record_stream(const void* base, c10::StreamId stream) {
  std::lock_guard<std::mutex> held(lock());
  auto found = blocks().find(base);
  if (found != blocks().end()) found->second.also_used.insert(stream);
}

}  // namespace softcuda

extern "C" int64_t softcuda_allocated() { return softcuda::allocated; }
extern "C" int64_t softcuda_most_allocated() { return softcuda::most_allocated; }
extern "C" void softcuda_reset_most_allocated() { softcuda::most_allocated = softcuda::allocated; }

// The stream that a block was allocated on, -1 for no block.
extern "C" int64_t softcuda_stream_of(const void* base) {
  std::lock_guard<std::mutex> held(softcuda::lock());
  auto found = softcuda::blocks().find(base);
  return found == softcuda::blocks().end() ? -1 : found->second.stream;
}

// Whether record_stream was called for a block with this stream.
extern "C" bool softcuda_is_recorded(const void* base, int64_t stream) {
  std::lock_guard<std::mutex> held(softcuda::lock());
  auto found = softcuda::blocks().find(base);
  return found != softcuda::blocks().end() && found->second.also_used.count(stream) > 0;
}

extern "C" bool softcuda_is_pinned(const void* data) { return softcuda::is_pinned(data); }
