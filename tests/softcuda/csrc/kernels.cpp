// Kernels of soft devices: those that know about memory are here, all others are the CPU's on the same values.
#include "random.h"
#include "soft.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <functional>
#include <optional>
#include <set>
#include <string>

namespace softcuda {

using at::Tensor;

// The same memory as a CPU tensor.
Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = tensor.storage();
  void* data = tensor.numel() ? tensor.data_ptr() : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [storage](void*) {}, tensor.options().device(at::kCPU));
}

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::get_default_dtype_as_scalartype());
}

Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, or_default(dtype), format);
}

Tensor empty_strided(at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), kKeys, or_default(dtype));
}

// Whether this thread runs a kernel of the CPU, whose copies to and from the device are none.
thread_local bool on_the_cpu_now = false;

struct OnTheCpu {
  OnTheCpu() { on_the_cpu_now = true; }
  ~OnTheCpu() { on_the_cpu_now = before; }
  bool before = on_the_cpu_now;
};

void wait_for(c10::StreamId stream) {
  if (!on_the_cpu_now) synchronize_stream(stream);
}

c10::StreamId stream_of(const Tensor& tensor) { return current_stream(tensor.device().index()); }

// The host waits for a copy to or from its own memory, unless it is told not to.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  host(self).copy_(host(source));
  if (self.is_cuda() != source.is_cuda() && !non_blocking) wait_for(stream_of(self.is_cuda() ? self : source));
  return self;
}

// Two that at::native::cpu_fallback writes its results back with: no copies between host and device.
Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  host(target).copy_(host(self));
  return target;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  host(target).copy_(host(self));
  return target;
}

at::Scalar read(const Tensor& self) {
  auto value = host(self).item();
  wait_for(stream_of(self));
  return value;
}

Tensor view(const Tensor& self, at::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor as_strided(const Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor reshape_alias(const Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& self, at::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

void resize_storage(const Tensor& holder, int64_t bytes) {
  c10::DeviceGuard guard(holder.device());
  at::native::resize_bytes_cpu(holder.storage().unsafeGetStorageImpl(), bytes);
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

// Attention as a composition of other kernels: the fused ones are CUDA's own.
int64_t no_fused_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                           std::optional<double>, bool) {
  return 0;
}

void record(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr().get(), stream.id()); }

// Kernels that take tensors of several devices: indices, and copies.
const std::set<std::string>& of_two_devices() {
  static const std::set<std::string> names = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
                                              "aten::_foreach_copy_"};
  return names;
}

// Kernels whose result has a size that the host reads.
const std::set<std::string>& of_unknown_size() {
  static const std::set<std::string> names = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                              "aten::unique_consecutive", "aten::repeat_interleave", "aten::equal"};
  return names;
}

void each_tensor(const c10::IValue& value, const std::function<void(const Tensor&)>& use) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) use(value.toTensor());
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) each_tensor(item, use);
  }
}

// Raises as CUDA kernels do. Tensors without dims may be of the CPU.
std::optional<at::Device> common_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  auto count = op.schema().arguments().size();
  std::optional<at::Device> found, other;
  for (size_t index = stack.size() - count; index < stack.size(); ++index) {
    each_tensor(stack[index], [&](const Tensor& tensor) {
      if (tensor.is_cuda() && !found) found = tensor.device();
      else if (tensor.is_cuda() ? tensor.device() != *found : tensor.dim() > 0) other = tensor.device();
    });
    if (stack[index].isDevice() && stack[index].toDevice().is_cuda() && !found) found = stack[index].toDevice();
  }
  TORCH_CHECK(!found || !other || of_two_devices().count(op.schema().name()),
              "Expected all tensors to be on the same device, but found at least two devices, ", found.value_or(at::kCPU), " and ",
              other.value_or(at::kCPU), "! (", op.schema().name(), ")");
  return found;
}

// The generator that an operator draws from; it is taken off the arguments, because CPU kernels refuse it.
std::optional<at::Generator> drawn_from(const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::DeviceIndex device) {
  auto count = op.schema().arguments().size();
  for (size_t index = stack.size() - count; index < stack.size(); ++index) {
    if (!stack[index].isGenerator()) continue;
    auto given = stack[index].toGenerator();
    if (!given.defined() || given.device().is_cpu()) continue;
    stack[index] = c10::IValue();
    return given;
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return default_generator(device);
  return std::nullopt;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::OptionalDeviceGuard guard(common_device(op, *stack));
  auto generator = drawn_from(op, *stack, current_device());
  std::optional<Drawing> drawing;
  if (generator) drawing.emplace(*generator);
  {
    OnTheCpu now;
    at::native::cpu_fallback(op, stack);
  }
  if (of_unknown_size().count(op.schema().name())) wait_for(current_stream(current_device()));
}

}  // namespace

// What `UntypedStorage.resize_` is for a tensor that has the storage: torch's own is compiled for CUDA only.
TORCH_LIBRARY_FRAGMENT(softcuda, m) { m.def("resize_storage(Tensor holder, int bytes) -> ()"); }
TORCH_LIBRARY_IMPL(softcuda, CUDA, m) { m.impl("resize_storage", resize_storage); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_fused_sdp_choice", no_fused_attention);
  m.impl("record_stream", record);
}

}  // namespace softcuda
