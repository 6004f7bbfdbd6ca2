// A tensor of another device than the CPU, in C++ as those of GPUs are: what sees it does not take it for one that is
// only traced. Nothing computes with it.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdlib>

extern "C" PyObject* device_tensor(int64_t count) {
  const auto bytes = static_cast<size_t>(count) * sizeof(float);
  const c10::Device device(c10::DeviceType::PrivateUse1, 0);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(std::calloc(1, bytes), device));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return THPVariable_Wrap(tensor);
}
