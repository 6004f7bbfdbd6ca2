// From which sequence numbers on the nodes that a thread makes belong to another call than those before.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace modtrace {

// How far back from a thread's newest sequence number boundaries are known: a bit for each number.
constexpr uint64_t kReach = 1 << 20;

// Used by its own thread alone.
class Boundaries {
 public:
  void add(uint64_t sequence) {
    if (sequence == newest_) return;
    if (bits_ == nullptr || sequence > newest_) reach(sequence);
    if (bits_ != nullptr) word(sequence) |= bit(sequence);
  }

  // Tells each of these nodes apart from its neighbours.
  void add_all(uint64_t first, uint64_t last) {
    for (first = std::max(first, last - std::min(last, kReach)); first <= last; ++first) add(first);
  }

  bool at(uint64_t sequence) const { return (word(sequence) & bit(sequence)) != 0; }

  // False where memory for them is wanting, or there were none.
  bool known() const { return bits_ != nullptr; }

  void forget() {
    bits_.reset();
    newest_ = kNone;
  }

 private:
  static constexpr uint64_t kWords = kReach / 64;
  static constexpr uint64_t kNone = ~uint64_t{0};

  struct Free {
    void operator()(uint64_t* bits) const { std::free(bits); }
  };

  static uint64_t bit(uint64_t sequence) { return uint64_t{1} << sequence % 64; }
  uint64_t& word(uint64_t sequence) const { return bits_[sequence / 64 % kWords]; }

  // Clears what was noted a whole reach ago, up to this number.
  void reach(uint64_t sequence) {
    const uint64_t target = sequence / 64;
    if (bits_ == nullptr) {
      // Pages of it that are never reached take no memory.
      bits_.reset(static_cast<uint64_t*>(std::calloc(kWords, sizeof(uint64_t))));
    } else {
      uint64_t done = newest_ / 64;
      if (target - done > kWords) done = target - kWords;
      while (done != target) bits_[++done % kWords] = 0;
    }
    newest_ = sequence;
  }

  uint64_t newest_ = kNone;
  std::unique_ptr<uint64_t[], Free> bits_;
};

}  // namespace modtrace
