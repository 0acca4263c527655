#include "random.h"

#include "soft.h"

#include <ATen/CPUGeneratorImpl.h>

#include <torch/library.h>

#include <array>

namespace softcuda {
namespace {

struct SoftGenerator final : c10::GeneratorImpl {
  explicit SoftGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kCuda, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  SoftGenerator* clone_impl() const override {
    auto* made = new SoftGenerator(device_.index());
    made->set_state(*get_state());
    return made;
  }
  at::Generator host;
};

at::CPUGeneratorImpl& of_cpu(const at::Generator& generator) {
  return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<SoftGenerator>(device); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::array<at::Generator, kMostDevices>;
    for (int index = 0; index < kMostDevices; ++index) (*all)[index] = new_generator(static_cast<c10::DeviceIndex>(index));
    return all;
  }();
  return (*made)[device < 0 ? current_device() : device];
}

Drawing::Drawing(const at::Generator& generator) : generator_(generator) { exchange(); }
Drawing::~Drawing() { exchange(); }

void Drawing::exchange() {
  auto& cpu = of_cpu(at::detail::getDefaultCPUGenerator());
  auto& own = of_cpu(static_cast<SoftGenerator*>(generator_.unsafeGetGeneratorImpl())->host);
  auto engine = cpu.engine();
  auto single = cpu.next_float_normal_sample();
  auto twice = cpu.next_double_normal_sample();
  cpu.set_engine(own.engine());
  cpu.set_next_float_normal_sample(own.next_float_normal_sample());
  cpu.set_next_double_normal_sample(own.next_double_normal_sample());
  own.set_engine(engine);
  own.set_next_float_normal_sample(single);
  own.set_next_double_normal_sample(twice);
}

// What torch.cuda.default_generators holds.
TORCH_LIBRARY_FRAGMENT(softcuda, m) {
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) -> std::optional<at::Generator> { return default_generator(static_cast<c10::DeviceIndex>(device)); });
}

}  // namespace softcuda
