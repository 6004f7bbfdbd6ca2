#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstddef>
#include <exception>
#include <mutex>

#include "backward.h"
#include "engine.h"

namespace modtrace {
namespace {

constexpr uint32_t kNotForBackward = UINT32_MAX;

struct Block {
  int64_t size = 0;
  uint32_t owner = 0, session = 0;
  uint32_t passes = kNotForBackward;  // number of passes that had started
};

// The counted blocks by address, in shards with a lock each. Never destroyed: blocks are freed until the
// process has ended.
class Blocks {
 public:
  // Adds a block; returns the earlier block at its address, if other code freed that.
  Block add(const void* address, const Block& block) {
    Shard& shard = shard_of(address);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    return std::exchange(shard.blocks[address], block);
  }

  // Removes and returns a block; a block without a size if it is not known.
  Block take(const void* address) {
    Shard& shard = shard_of(address);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.blocks.find(address);
    if (found == shard.blocks.end()) return {};
    const Block block = found->second;
    shard.blocks.erase(found);
    return block;
  }

  // Gives a block to another owner, and returns the block before that; a block without a size if it is not known.
  Block give(const void* address, const Block& owned) {
    Shard& shard = shard_of(address);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.blocks.find(address);
    if (found == shard.blocks.end()) return {};
    const int64_t size = found->second.size;
    const Block before = std::exchange(found->second, owned);
    found->second.size = size;
    return before;
  }

  void clear() {
    for (Shard& shard : shards_) {
      const std::lock_guard<std::mutex> lock(shard.mutex);
      shard.blocks.clear();
    }
  }

  // Around a fork, so that no other thread holds a lock that the child would wait for.
  void lock_all() {
    for (Shard& shard : shards_) shard.mutex.lock();
  }
  void unlock_all() {
    for (Shard& shard : shards_) shard.mutex.unlock();
  }

 private:
  static constexpr size_t kShards = 64;
  static constexpr size_t kBlockAlignment = 64;

  struct alignas(64) Shard {
    std::mutex mutex;
    ska::flat_hash_map<const void*, Block> blocks;
  };

  Shard& shard_of(const void* address) {
    return shards_[reinterpret_cast<size_t>(address) / kBlockAlignment % kShards];
  }

  std::array<Shard, kShards> shards_;
};

Blocks& counted_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

Blocks& device_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

// The owner of blocks that this thread allocates now.
size_t current_owner() {
  const ThreadState& thread = this_thread();
  const int graph_task = current_graph_task();
  if (thread.generation == current_generation() && !thread.open_calls.empty() &&
      thread.open_calls.back().graph_task == graph_task) {
    const size_t owner = kFirstModule + static_cast<size_t>(thread.open_calls.back().name_id);
    return held_bytes.has(owner) ? owner : kOutside;
  }
  if (graph_task != kNoGraphTask) return kInBackward;
  return thread.optimizer_steps > 0 ? kInOptimizer : kOutside;
}

Block new_block(size_t bytes) {
  const bool for_backward = c10::GradMode::is_enabled() && current_graph_task() == kNoGraphTask;
  return {static_cast<int64_t>(bytes), static_cast<uint32_t>(current_owner()),
          static_cast<uint32_t>(current_generation()), for_backward ? memory.passes.load() : kNotForBackward};
}

// Subtracts a block from its owner, and returns whether it is of this session: blocks of earlier sessions are kOutside.
bool take_from_owner(const Block& block) {
  const bool is_known = block.session == static_cast<uint32_t>(current_generation());
  held_bytes[is_known ? block.owner : kOutside].bytes.fetch_sub(block.size, std::memory_order_relaxed);
  return is_known;
}

void note_peak(int64_t live) {
  const std::unique_lock<std::mutex> lock(held_at_peak.mutex, std::try_to_lock);
  if (!lock || live <= held_at_peak.most.load(std::memory_order_relaxed)) return;
  held_at_peak.most.store(live, std::memory_order_relaxed);
  for (size_t owner = kInBackward; owner < kFirstModule; ++owner) {
    held_at_peak.bytes[owner] = held_bytes[owner].bytes.load(std::memory_order_relaxed);
  }
  held_at_peak.bytes[kOutside] = live;
  held_at_peak.is_new = true;
}

// Resets the peak when counting starts; `live`: the bytes now.
void begin_peak(int64_t live) {
  const std::lock_guard<std::mutex> lock(held_at_peak.mutex);
  held_at_peak.most.store(live);
  held_at_peak.is_new = false;
}

void count_on(const Block& block) {
  held_bytes[block.owner].bytes.fetch_add(block.size, std::memory_order_relaxed);
  const int64_t live = memory.live.fetch_add(block.size, std::memory_order_relaxed) + block.size;
  int64_t most = memory.most.load(std::memory_order_relaxed);
  while (live > most && !memory.most.compare_exchange_weak(most, live, std::memory_order_relaxed)) {
  }
  if (live > held_at_peak.most.load(std::memory_order_relaxed)) note_peak(live);
}

void count_off(const Block& block) {
  memory.live.fetch_sub(block.size, std::memory_order_relaxed);
  const bool is_known = take_from_owner(block);
  if (is_known && block.passes != kNotForBackward && block.passes != memory.passes.load(std::memory_order_relaxed)) {
    held_bytes[block.owner].saved.fetch_add(block.size, std::memory_order_relaxed);
  }
}

// Counts a block of the CPU, also in the owners' bytes if no GPU's bytes are counted.
void count_on_cpu(const Block& block) {
  memory.cpu_live.fetch_add(block.size, std::memory_order_relaxed);
  if (memory.device.load(std::memory_order_relaxed) < 0) count_on(block);
}

void count_off_cpu(const Block& block) {
  memory.cpu_live.fetch_sub(block.size, std::memory_order_relaxed);
  if (memory.device.load(std::memory_order_relaxed) < 0) count_off(block);
}

c10::DeleterFnPtr delete_wrapped = nullptr;

// Subtracts a block before it is freed: another thread may get its address at once.
void delete_counted(void* block) {
  count_off_cpu(counted_blocks().take(block));
  delete_wrapped(block);
}

// Allocates by the wrapped allocator, which still reports each block to torch's profiler.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& wrapped) : wrapped_(wrapped) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (!memory.counting.load(std::memory_order_relaxed)) return wrapped_.allocate(bytes);
    c10::DataPtr block;
    try {
      block = wrapped_.allocate(bytes);
    } catch (...) {
      note_refused(bytes);
      throw;
    }
    // A block of no bytes has no address.
    if (block.get() == nullptr || !block.compare_exchange_deleter(delete_wrapped, delete_counted)) return block;
    try {
      const Block noted = new_block(bytes);
      count_off_cpu(counted_blocks().add(block.get_context(), noted));
      count_on_cpu(noted);
    } catch (const std::exception&) {
      // Without memory for the entry, the block is not counted.
    }
    return block;
  }

  // Blocks that were allocated while nothing was counted are not known, and are freed too.
  c10::DeleterFnPtr raw_deleter() const override { return delete_counted; }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return wrapped_.is_simple_data_ptr(block); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    wrapped_.copy_data(target, source, bytes);
  }

 private:
  c10::Allocator& wrapped_;
};

// Installs the allocator, once. False if it is not the CPU's allocator: another one cannot be wrapped, or replaced it.
bool install_allocator() {
  static CountingAllocator* ours = nullptr;
  if (ours == nullptr) {
    c10::Allocator* wrapped = c10::GetAllocator(at::kCPU);
    delete_wrapped = wrapped->raw_deleter();
    if (delete_wrapped == nullptr) return false;
    ours = new CountingAllocator(*wrapped);
    constexpr auto unlock = [] {
      held_at_peak.mutex.unlock();
      device_blocks().unlock_all();
      counted_blocks().unlock_all();
    };
    pthread_atfork(
        [] {
          counted_blocks().lock_all();
          device_blocks().lock_all();
          held_at_peak.mutex.lock();
        },
        unlock, unlock);
    // With the priority of the earlier allocator, so that code which replaces allocators later behaves as before.
    for (int priority = 0; priority <= UINT8_MAX && c10::GetAllocator(at::kCPU) != ours; ++priority) {
      c10::SetAllocator(at::kCPU, ours, static_cast<uint8_t>(priority));
    }
  }
  return c10::GetAllocator(at::kCPU) == ours;
}

}  // namespace

void note_refused(size_t bytes) {
  ThreadState& thread = this_thread();
  if (thread.generation != current_generation()) return;
  sample_held(true, [&](int64_t meta, int64_t value) { write_without_gil(thread, meta, value); });
  write_without_gil(thread, memory.refused_meta.load(), static_cast<int64_t>(bytes));
}

void count_device(int device, int64_t held) {
  memory.device.store(device);
  device_blocks().clear();
  held_bytes.each([](Owner& owner, size_t) { owner.bytes.store(0); });
  held_bytes[kOutside].bytes.store(held);
  memory.live.store(held);
  memory.most.store(held);
  begin_peak(held);
  memory.sampled.store(-1);
  memory.sample_meta.store(memory.device_meta.load());
}

void note_device_block(size_t address, size_t bytes) {
  const Block noted = new_block(bytes);
  device_blocks().add(reinterpret_cast<const void*>(address), noted);
  count_on(noted);
}

void note_device_free(size_t address, size_t bytes) {
  Block block = device_blocks().take(reinterpret_cast<const void*>(address));
  if (block.size == 0)
    block.size = static_cast<int64_t>(bytes);  // allocated before this session: it belongs to no module
  count_off(block);
}

PyObject* start_memory(PyObject*, PyObject* args) {
  long long text, device_text, refused_text;
  if (!PyArg_ParseTuple(args, "LLL", &text, &device_text, &refused_text)) return nullptr;
  if (!held_bytes.has(kOutside) || !install_allocator()) Py_RETURN_FALSE;
  memory.sample_meta.store(int64_t{kCounter} << kKindShift | text);
  memory.device_meta.store(int64_t{kCounter} << kKindShift | device_text);
  memory.refused_meta.store(int64_t{kCounter} << kKindShift | refused_text);
  held_bytes.each([](Owner& owner, size_t) {
    owner.bytes.store(0);
    owner.written.store(0);
    owner.saved.store(0);
    owner.written_saved.store(0);
  });
  held_bytes.samples.store(0);
  memory.passes.store(0);
  memory.device.store(kCpu);
  memory.live.store(memory.cpu_live.load());
  held_bytes[kOutside].bytes.store(memory.live.load());
  memory.most.store(memory.live.load());
  begin_peak(memory.live.load());
  memory.sampled.store(-1);  // so that the first event has a sample
  memory.counting.store(true);
  Py_RETURN_TRUE;
}

void note_parameters(PyObject* module) {
  static PyObject* const name = PyUnicode_InternFromString("_parameters");
  const PyRef fields = name == nullptr ? PyRef() : steal(PyObject_GenericGetDict(module, nullptr));
  PyObject* parameters = fields && PyDict_Check(fields.get()) ? PyDict_GetItemWithError(fields.get(), name) : nullptr;
  PyErr_Clear();
  if (parameters == nullptr || !PyDict_Check(parameters)) return;
  const bool on_cpu = memory.device.load() < 0;
  Py_ssize_t at = 0;
  for (PyObject* parameter = nullptr; PyDict_Next(parameters, &at, nullptr, &parameter) != 0;) {
    if (!THPVariable_Check(parameter)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(parameter);
    // A wrapper would ask Python for its device.
    if (tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_cpu() != on_cpu || !tensor.has_storage())
      continue;
    try {
      const Block owned{0, kParameters, static_cast<uint32_t>(current_generation())};
      const Block before =
          (on_cpu ? counted_blocks() : device_blocks()).give(tensor.storage().data_ptr().get_context(), owned);
      take_from_owner(before);
      held_bytes[kParameters].bytes.fetch_add(before.size, std::memory_order_relaxed);
    } catch (const c10::Error&) {
      // A tensor without data, such as a fake tensor.
    }
  }
}

PyObject* watch_cuda_memory(PyObject*, PyObject*) {
  if (!memory.counting.load()) Py_RETURN_NONE;
  if (ask_cuda_allocator == nullptr) return PyUnicode_FromString("the engine was built without CUDA's headers");
  try {
    ask_cuda_allocator();
  } catch (const std::exception& error) {
    return PyUnicode_FromString(error.what());
  }
  Py_RETURN_NONE;
}

}  // namespace modtrace
