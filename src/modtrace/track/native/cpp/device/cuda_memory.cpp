// The blocks that CUDA's caching allocator reports. Compiled if CUDA's headers exist; no other unit needs them.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <exception>

#include "../memory.h"

namespace modtrace {
namespace {

namespace cuda = c10::cuda::CUDACachingAllocator;

// Runs while the allocator holds its lock: it must not call Python, and no exception may leave it.
void on_trace(const cuda::TraceEntry& entry) {
  if (!memory.counting.load(std::memory_order_relaxed)) return;
  const bool is_block = entry.action_ == cuda::TraceEntry::ALLOC;
  if (is_block && memory.device.load(std::memory_order_relaxed) == kFirstDevice) count_device(entry.device_, 0);
  if (memory.device.load(std::memory_order_relaxed) != entry.device_) return;
  try {
    if (is_block) {
      note_device_block(entry.addr_, entry.size_);
    } else if (entry.action_ == cuda::TraceEntry::FREE_COMPLETED) {
      note_device_free(entry.addr_, entry.size_);
    } else if (entry.action_ == cuda::TraceEntry::OOM) {
      note_refused(entry.size_);
    }
  } catch (const std::exception&) {
    // Without memory for the entry, the block is not counted.
  }
}

void ask_allocator() {
  static bool asked = false;
  if (!asked) cuda::attachAllocatorTraceTracker(on_trace);
  asked = true;
  int device = kFirstDevice;
  int64_t held = 0;
  for (c10::DeviceIndex index = 0; index < c10::cuda::device_count(); ++index) {
    const int64_t bytes = cuda::getDeviceStats(index).requested_bytes[0].current;
    if (bytes > held) device = index;
    held = std::max(held, bytes);
  }
  if (device >= 0) {
    count_device(device, held);
  } else {
    memory.device.store(kFirstDevice);
  }
}

const bool is_known = [] {
  ask_cuda_allocator = ask_allocator;
  return true;
}();

}  // namespace
}  // namespace modtrace
