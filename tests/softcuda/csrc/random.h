// The random generators of soft devices: apart from the CPU's, as on a GPU, with the CPU's kernels.
#pragma once
#include <ATen/core/Generator.h>

namespace softcuda {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// While it lives, the CPU's default generator continues a generator of a soft device.
class Drawing {
 public:
  explicit Drawing(const at::Generator& generator);
  ~Drawing();
  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;

 private:
  void exchange();
  at::Generator generator_;
};

}  // namespace softcuda
