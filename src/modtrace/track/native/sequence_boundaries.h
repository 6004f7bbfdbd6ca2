// Segments of a thread's autograd nodes: at which sequence numbers the nodes of another module call begin.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace modtrace {

// How far back from a thread's newest sequence number boundaries are known; a bit for each number.
constexpr uint64_t kSequenceWindow = 1 << 20;

// A bit set over the last kSequenceWindow sequence numbers of a thread. Used by that thread alone.
class SequenceBoundaries {
 public:
  // Notes that the nodes from this number on belong to another call than those before it.
  void add(uint64_t sequence) {
    if (sequence == newest_) return;
    if (bits_ == nullptr || sequence > newest_) advance(sequence);
    if (bits_ != nullptr) word(sequence) |= bit(sequence);
  }

  // Makes a boundary of each number in [first, last]: each of these nodes is a segment of its own.
  void add_all(uint64_t first, uint64_t last) {
    for (first = std::max(first, last - std::min(last, kSequenceWindow)); first <= last; ++first) add(first);
  }

  // Only where allocated().
  bool is_boundary(uint64_t sequence) const { return (word(sequence) & bit(sequence)) != 0; }

  // False before the first boundary, and where there is no memory for them.
  bool allocated() const { return bits_ != nullptr; }

  void reset() {
    bits_.reset();
    newest_ = kNone;
  }

 private:
  static constexpr uint64_t kWords = kSequenceWindow / 64;
  static constexpr uint64_t kNone = ~uint64_t{0};

  struct Free {
    void operator()(uint64_t* bits) const { std::free(bits); }
  };

  static uint64_t bit(uint64_t sequence) { return uint64_t{1} << sequence % 64; }
  uint64_t& word(uint64_t sequence) const { return bits_[sequence / 64 % kWords]; }

  // Moves the window up to this number, and clears the words that enter it.
  void advance(uint64_t sequence) {
    const uint64_t target = sequence / 64;
    if (bits_ == nullptr) {
      // Pages of it that are never written take no memory.
      bits_.reset(static_cast<uint64_t*>(std::calloc(kWords, sizeof(uint64_t))));
    } else {
      uint64_t cleared = newest_ / 64;
      if (target - cleared > kWords) cleared = target - kWords;
      while (cleared != target) bits_[++cleared % kWords] = 0;
    }
    newest_ = sequence;
  }

  uint64_t newest_ = kNone;
  std::unique_ptr<uint64_t[], Free> bits_;
};

}  // namespace modtrace
