// The bytes of tensors: on a CUDA GPU once the process allocates there, until then on the CPU.
//
// On the CPU, an allocator around torch's counts them. It is installed once per process and stays. A recording turns
// its counting on and off: a block that is allocated meanwhile is counted until it is freed, also after the recording;
// any other block is not touched. CUDA's allocator reports each block itself (device/cuda_memory.cpp).

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "py_ref.h"
#include "slot_format.h"

namespace modtrace {

constexpr int kCpu = -1, kFirstDevice = -2;

struct MemoryCounts {
  std::atomic<bool> counting{false};     // whether new blocks are counted, and events have samples before them
  std::atomic<int> device{kCpu};         // GPU whose blocks are counted; kFirstDevice: the CPU's until a GPU has one
  std::atomic<int64_t> cpu_live{0};      // bytes of the CPU's counted blocks that are not freed
  std::atomic<int64_t> live{0};          // bytes of all counted blocks now
  std::atomic<int64_t> most{0};          // maximum of `live` since the last sample
  std::atomic<int64_t> sampled{0};       // value of `live` at the last sample
  std::atomic<int64_t> sample_meta{0};   // meta of a sample, without the thread
  std::atomic<int64_t> device_meta{0};   // meta of a sample of a GPU's bytes, without the thread
  std::atomic<int64_t> refused_meta{0};  // meta of an event for bytes that could not be allocated
  std::atomic<uint32_t> passes{0};       // number of outermost backward passes so far
};

inline MemoryCounts memory;

// Owners of blocks: code outside modules, the nodes of backward passes, the steps of optimizers, parameters, and then
// the calls of each module, by the id of its name. The block of a parameter changes its owner once its module is
// called.
constexpr uint32_t kSavedEvery = 64;
constexpr size_t kOutside = 0, kInBackward = 1, kInOptimizer = 2, kParameters = 3, kFirstModule = 4;

struct Owner {
  std::atomic<int64_t> bytes, written;        // bytes of its blocks now, and in its last event
  std::atomic<int64_t> saved, written_saved;  // bytes freed in or after a backward pass so far, and in its last event
};

// The bytes of each owner's blocks; blocks of earlier sessions belong to no module. Every name of a ring has an owner.
// Parts of owners are made when one of them first allocates, and are never freed.
struct HeldBytes {
  static constexpr size_t kPart = 1 << 8;
  using Part = std::array<Owner, kPart>;
  std::array<std::atomic<Part*>, (kFirstModule + kNoName) / kPart + 1> parts;
  std::atomic<size_t> used{0};  // index of the last part, plus 1
  std::atomic<uint32_t> samples{0};

  // Makes the owner's part if there is none. False if there is no memory for it.
  bool has(size_t owner) {
    std::atomic<Part*>& part = parts[owner / kPart];
    if (part.load(std::memory_order_acquire) != nullptr) return true;
    std::unique_ptr<Part> made(new (std::nothrow) Part());
    Part* none = nullptr;
    if (made && part.compare_exchange_strong(none, made.get())) made.release();
    size_t before = used.load();
    while (before <= owner / kPart && !used.compare_exchange_weak(before, owner / kPart + 1)) {
    }
    return part.load() != nullptr;
  }

  // An owner that has a part.
  Owner& operator[](size_t owner) { return (*parts[owner / kPart].load(std::memory_order_acquire))[owner % kPart]; }

  // Calls `see` with each owner that has a part, and its number.
  template <class See>
  void each(const See& see) {
    for (size_t part = 0, end = used.load(); part < end; ++part) {
      Part* owners = parts[part].load(std::memory_order_acquire);
      for (size_t i = 0; owners != nullptr && i < kPart; ++i) see((*owners)[i], part * kPart + i);
    }
  }
};

inline HeldBytes held_bytes;

// The bytes at the peak so far: of all blocks, and of owners that are not modules.
struct HeldAtPeak {
  std::mutex mutex;
  std::atomic<int64_t> most{0};
  std::array<int64_t, kFirstModule> bytes{};  // the first value: of all blocks
  bool is_new = false;                        // whether it changed since it was written
};

inline HeldAtPeak held_at_peak;

// Writes the bytes of owners whose bytes changed since the last event, or of all owners; seldom also the number of
// passes, and the bytes that calls of modules kept for them. `write` gets meta without the thread, and a value.
template <class Write>
void sample_held(bool of_all, const Write& write) {
  held_bytes.each([&](Owner& owner, size_t number) {
    const int64_t bytes = owner.bytes.load(std::memory_order_relaxed);
    if (owner.written.exchange(bytes, std::memory_order_relaxed) == bytes && !(of_all && bytes != 0)) return;
    const int64_t name = number < kFirstModule ? kNoName : static_cast<int64_t>(number - kFirstModule);
    const int64_t holder = number < kFirstModule ? static_cast<int64_t>(number) : 0;
    write(int64_t{kHeld} << kKindShift | name, bytes << kHolderBits | holder);
  });
  std::array<int64_t, kFirstModule> at_peak{};
  if (const std::lock_guard<std::mutex> lock(held_at_peak.mutex); std::exchange(held_at_peak.is_new, false)) {
    at_peak = held_at_peak.bytes;
  }
  for (size_t owner = 0; at_peak[0] != 0 && owner < kFirstModule; ++owner) {
    write(int64_t{kHeldAtPeak} << kKindShift | kNoName, at_peak[owner] << kHolderBits | static_cast<int64_t>(owner));
  }
  const uint32_t sample = ++held_bytes.samples;
  if (of_all || (sample % kSavedEvery != 0 && (sample & (sample - 1)) != 0)) return;
  write(int64_t{kSaved} << kKindShift | kNoName, memory.passes.load());
  held_bytes.each([&](Owner& owner, size_t number) {
    const int64_t saved = number < kFirstModule ? 0 : owner.saved.load();
    if (owner.written_saved.exchange(saved) == saved) return;
    write(int64_t{kSaved} << kKindShift | static_cast<int64_t>(number - kFirstModule), saved);
  });
}

// Samples the counts if they changed since the last sample: the maximum since then if it is above both, and the bytes
// now. `write` gets a number of bytes.
template <class Write>
void sample_memory(const Write& write) {
  const int64_t live = memory.live.load(std::memory_order_relaxed);
  if (memory.sampled.load(std::memory_order_relaxed) == live && memory.most.load(std::memory_order_relaxed) == live) {
    return;
  }
  const int64_t before = memory.sampled.exchange(live), most = memory.most.exchange(live);
  if (most > std::max(live, before)) write(most);
  if (most > std::max(live, before) || live != before) write(live);
}

// start_memory(text, device_text, refused_text): start to count in the running session, and write counters with these
// texts. False if the CPU's allocator cannot be wrapped.
PyObject* start_memory(PyObject*, PyObject* args);

// Makes the blocks of a module's own parameters blocks of parameters. Runs no code of the user's.
void note_parameters(PyObject* module);

// watch_cuda_memory(): count a GPU's bytes from its first block on; called once CUDA is initialized. Returns the reason
// if that is impossible, or None.
PyObject* watch_cuda_memory(PyObject*, PyObject*);

// Asks CUDA's allocator to report its blocks, once per process, and counts the GPU with the most bytes. Throws if the
// allocator is not torch's own; null in a library that was built without CUDA.
inline void (*ask_cuda_allocator)() = nullptr;

// Starts to count a GPU's bytes; `held`: its bytes now.
void count_device(int device, int64_t held);

// A block that the counted GPU's allocator allocates or frees.
void note_device_block(size_t address, size_t bytes);
void note_device_free(size_t address, size_t bytes);

// Writes the number of bytes that could not be allocated, and the bytes of all owners, on a thread of the session.
void note_refused(size_t bytes);

// At the end of a session.
inline void stop_memory() { memory.counting.store(false); }

}  // namespace modtrace
