// The bytes that tensors hold: on a GPU of CUDA as soon as the process allocates there, else on the CPU.
//
// On the CPU an allocator around torch's counts them. It is put in once per process and stays. A recording turns its
// counting on and off: a block that is allocated meanwhile is counted until it is freed, whenever that is; any other
// block is torch's alone. CUDA's allocator reports each block itself (device/cuda_memory.cpp).

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
  std::atomic<int> device{kCpu};         // which GPU's blocks are counted; kFirstDevice: the CPU's until a GPU has one
  std::atomic<int64_t> cpu_live{0};      // bytes of the CPU's blocks that were counted and are not freed
  std::atomic<int64_t> live{0};          // bytes that are held now
  std::atomic<int64_t> most{0};          // the most of them since the last sample
  std::atomic<int64_t> sampled{0};       // of them at the last sample
  std::atomic<int64_t> sample_meta{0};   // meta of a sample, without the thread
  std::atomic<int64_t> device_meta{0};   // the same of a GPU's bytes
  std::atomic<int64_t> refused_meta{0};  // meta of an event for bytes that could not be allocated
  std::atomic<uint32_t> passes{0};       // backward passes that began in no other
};

inline MemoryCounts memory;

// Who allocates a block: no module, the nodes of a backward pass, the step of an optimizer, or the calls of a module,
// whose name follows these. A block of a parameter is that, whoever allocated it, once its module is called.
constexpr uint32_t kSavedEvery = 64;
constexpr size_t kOutside = 0, kInBackward = 1, kInOptimizer = 2, kParameters = 3, kFirstModule = 4;

struct Owner {
  std::atomic<int64_t> bytes, written;        // that its blocks hold now, and in its last event
  std::atomic<int64_t> saved, written_saved;  // freed in or after a backward pass, so far
};

// What the blocks of each owner hold; those of earlier sessions belong to none. There is room for every name that a
// ring can have, in parts that are made when an owner of them allocates first, and are never freed.
struct HeldBytes {
  static constexpr size_t kPart = 1 << 8;
  using Part = std::array<Owner, kPart>;
  std::array<std::atomic<Part*>, (kFirstModule + kNoName) / kPart + 1> parts;
  std::atomic<size_t> used{0};  // how many parts there may be
  std::atomic<uint32_t> samples{0};

  // Makes the owner's part where there is none. False where there is no memory for it.
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

// What all together, and owners that are not modules, held when most was held so far.
struct HeldAtPeak {
  std::mutex mutex;
  std::atomic<int64_t> most{0};
  std::array<int64_t, kFirstModule> bytes{};  // the first: all together
  bool is_new = false;                        // since it was written
};

inline HeldAtPeak held_at_peak;

// Writes what owners hold, where that changed since it was written, or of all; seldom also how many passes there were,
// and what calls of modules kept for them. `write` takes meta without the thread, and a value.
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

// Samples the counts if they changed since the last sample: the most bytes since then if that is above both, and the
// bytes now. `write` takes a number of bytes.
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

// start_memory(text, device_text, refused_text): count from now on in the session that runs, and write counters with
// these texts. False where the CPU's allocator is another's, which cannot be wrapped.
PyObject* start_memory(PyObject*, PyObject* args);

// Counts the blocks of a module's own parameters as such from now on. Runs nothing of the user's.
void note_parameters(PyObject* module);

// watch_cuda_memory(): count a GPU's bytes from its first block on; called once CUDA is initialized. Returns what keeps
// it from that, or None.
PyObject* watch_cuda_memory(PyObject*, PyObject*);

// Asks CUDA's allocator to report its blocks, once per process, and counts the GPU that holds most. Throws where that
// is another allocator than torch's own; null in a library that was built without CUDA.
inline void (*ask_cuda_allocator)() = nullptr;

// Counts a GPU's bytes from now on, of which it holds so many.
void count_device(int device, int64_t held);

// What that GPU gives and takes back.
void note_device_block(size_t address, size_t bytes);
void note_device_free(size_t address, size_t bytes);

// Notes how many bytes could not be allocated, and who holds all others, on a thread that the session knows.
void note_refused(size_t bytes);

// Where a session ends.
inline void stop_memory() { memory.counting.store(false); }

}  // namespace modtrace
