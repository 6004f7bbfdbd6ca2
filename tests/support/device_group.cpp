// Tensors of another device than the CPU, in C++ as those of GPUs are, and a process group that is to a device that
// pretends what NCCL is to a GPU: its collectives are kernels, and to wait for one lets a stream wait.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace {

using Launch = void (*)(int64_t);

// What queues a kernel of so many ns on the current stream.
Launch launch = nullptr;
int64_t kernel_ns = 0;

// The stream that waits is in it for as long as the kernel takes.
struct Waited final : c10d::Work {
  bool wait(std::chrono::milliseconds) override {
    launch(kernel_ns);
    return true;
  }
};

struct Group final : c10d::Backend {
  Group() : Backend(0, 1) {}
  const std::string getBackendName() const override { return "pretended"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions& options) override {
    // As NCCL since torch 2.8: what nobody is to wait for runs on the current stream, and the rest on one of its own.
    if (options.asyncOp) return c10::make_intrusive<Waited>();
    launch(kernel_ns);
    return nullptr;
  }
};

}  // namespace

extern "C" {

// Gives a tensor that nothing computes with; what sees it does not take it for one that is only traced.
PyObject* device_tensor(int64_t count) {
  const auto bytes = static_cast<size_t>(count) * sizeof(float);
  const c10::Device device(c10::DeviceType::PrivateUse1, 0);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(std::calloc(1, bytes), device));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return THPVariable_Wrap(tensor);
}

void set_kernel_ns(int64_t ns) { kernel_ns = ns; }

PyObject* device_group(Launch launch_kernel, int64_t ns) {
  launch = launch_kernel;
  kernel_ns = ns;
  return pybind11::cast(c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>())).release().ptr();
}
}
