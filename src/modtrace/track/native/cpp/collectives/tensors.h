// The tensors that a collective is given: how many bytes, and of which device.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

namespace modtrace {

inline int64_t tensor_bytes(const at::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
  }
  int64_t bytes = 0;
  if (value.isList()) {
    for (const at::IValue& element : value.toListRef()) {
      if (element.isTensor() || element.isList()) bytes += tensor_bytes(element);
    }
  }
  return bytes;
}

inline const at::Tensor* first_tensor(const at::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? &value.toTensor() : nullptr;
  if (!value.isList()) return nullptr;
  for (const at::IValue& element : value.toListRef()) {
    if (!element.isTensor() && !element.isList()) return nullptr;
    if (const at::Tensor* tensor = first_tensor(element)) return tensor;
  }
  return nullptr;
}

// Whether it is only traced: a fake tensor, or one that some Python code stands for.
inline bool is_traced(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_meta();
}

}  // namespace modtrace
