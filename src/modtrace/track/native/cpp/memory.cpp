#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <array>
#include <cstddef>
#include <exception>
#include <mutex>

#include "ring_writer.h"

namespace modtrace {
namespace {

// The sizes of counted blocks by address, in shards with a lock each. Never destroyed: blocks are freed until the
// process has ended.
class BlockSizes {
 public:
  // Notes a block; returns the size of one that had its address and was freed by other means.
  int64_t add(const void* block, int64_t size) {
    Shard& shard = shard_of(block);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    int64_t& known = shard.sizes[block];
    return std::exchange(known, size);
  }

  // Forgets a block, and returns its size; 0 for one that is not known.
  int64_t take(const void* block) {
    Shard& shard = shard_of(block);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.sizes.find(block);
    if (found == shard.sizes.end()) return 0;
    const int64_t size = found->second;
    shard.sizes.erase(found);
    return size;
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
    ska::flat_hash_map<const void*, int64_t> sizes;
  };

  Shard& shard_of(const void* block) { return shards_[reinterpret_cast<size_t>(block) / kBlockAlignment % kShards]; }

  std::array<Shard, kShards> shards_;
};

BlockSizes& block_sizes() {
  static auto* sizes = new BlockSizes;
  return *sizes;
}

void add_live(int64_t bytes) {
  const int64_t live = memory.live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t most = memory.most.load(std::memory_order_relaxed);
  while (live > most && !memory.most.compare_exchange_weak(most, live, std::memory_order_relaxed)) {
  }
}

// Notes how many bytes could not be allocated, on a thread that the session knows.
void note_refused(size_t bytes) {
  ThreadState& thread = this_thread();
  if (thread.generation != current_generation()) return;
  write_without_gil(thread, memory.refused_meta.load(), static_cast<int64_t>(bytes));
}

c10::DeleterFnPtr delete_wrapped = nullptr;

// Counts a block off before it is freed: another thread may be given its address at once.
void delete_counted(void* block) {
  memory.live.fetch_sub(block_sizes().take(block), std::memory_order_relaxed);
  delete_wrapped(block);
}

// Allocates by the allocator that it wraps, which still tells torch's profiler of each block.
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
      const auto size = static_cast<int64_t>(bytes);
      add_live(size - block_sizes().add(block.get_context(), size));
    } catch (const std::exception&) {
      // There is no memory to note it: it is not counted.
    }
    return block;
  }

  // What was allocated while nothing was counted is not known to it, and is freed all the same.
  c10::DeleterFnPtr raw_deleter() const override { return delete_counted; }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return wrapped_.is_simple_data_ptr(block); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    wrapped_.copy_data(target, source, bytes);
  }

 private:
  c10::Allocator& wrapped_;
};

// Puts the allocator in, once. False where it is not the CPU's: the one there cannot be wrapped, or has replaced it.
bool install_allocator() {
  static CountingAllocator* ours = nullptr;
  if (ours == nullptr) {
    c10::Allocator* wrapped = c10::GetAllocator(at::kCPU);
    delete_wrapped = wrapped->raw_deleter();
    if (delete_wrapped == nullptr) return false;
    ours = new CountingAllocator(*wrapped);
    pthread_atfork([] { block_sizes().lock_all(); }, [] { block_sizes().unlock_all(); },
                   [] { block_sizes().unlock_all(); });
    // With the priority that the one there has: who replaces allocators later is to find what it would have found.
    for (int priority = 0; priority <= UINT8_MAX && c10::GetAllocator(at::kCPU) != ours; ++priority) {
      c10::SetAllocator(at::kCPU, ours, static_cast<uint8_t>(priority));
    }
  }
  return c10::GetAllocator(at::kCPU) == ours;
}

}  // namespace

PyObject* start_memory(PyObject*, PyObject* args) {
  long long text, refused_text;
  if (!PyArg_ParseTuple(args, "LL", &text, &refused_text)) return nullptr;
  if (!install_allocator()) Py_RETURN_FALSE;
  memory.sample_meta.store(int64_t{kCounter} << kKindShift | text);
  memory.refused_meta.store(int64_t{kCounter} << kKindShift | refused_text);
  memory.most.store(memory.live.load());
  memory.sampled.store(-1);  // so that the first event has a sample
  memory.counting.store(true);
  Py_RETURN_TRUE;
}

}  // namespace modtrace
