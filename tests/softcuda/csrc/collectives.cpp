// Collectives of a gloo group on tensors of soft devices: gloo works on the same memory as CPU tensors. It has no messages between
// two ranks for CUDA tensors, and refuses them here as well.
#include "soft.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace softcuda {

at::Tensor host(const at::Tensor& tensor);

namespace {

c10::IValue hosted(const c10::IValue& value) {
  if (value.isTensor()) return host(value.toTensor());
  if (!value.isList()) return value;
  auto copied = value.toList().copy();
  for (size_t index = 0; index < copied.size(); ++index) copied.set(index, hosted(copied.get(index)));
  return copied;
}

// Runs a collective on the CPU. It fills its arguments; a result that names them is made of the device's own tensors.
void through_gloo(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto count = op.schema().arguments().size();
  auto arguments = torch::jit::last(*stack, count);
  c10::IValue filled = arguments[0];
  for (size_t index = stack->size() - count; index < stack->size(); ++index) (*stack)[index] = hosted((*stack)[index]);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto results = op.schema().returns().size();
  if (results > 1) (*stack)[stack->size() - results] = filled;
}

void refused(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, "ProcessGroupGloo has no ", op.schema().name(), " for CUDA tensors");
}

// torch warns of kernels that replace others, as these do.
struct NoWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
NoWarnings no_warnings;
c10::WarningHandler* const usual_warnings = [] {
  auto* before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&no_warnings);
  return before;
}();

constexpr const char* kCollectives[] = {
    "allreduce_",        "broadcast_",         "allgather_",       "_allgather_base_",  "allgather_into_tensor_coalesced_",
    "reduce_",           "gather_",            "scatter_",         "reduce_scatter_",   "_reduce_scatter_base_",
    "alltoall_base_",    "alltoall_",          "allreduce_coalesced_", "allgather_coalesced_", "reduce_scatter_tensor_coalesced_",
};

}  // namespace

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto name : kCollectives) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&through_gloo>());
  for (auto name : {"send", "recv_"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refused>());
}

const bool warns_again = (c10::WarningUtils::set_warning_handler(usual_warnings), true);

}  // namespace softcuda
