// Segments of a thread's autograd nodes: at which sequence numbers the nodes of another module call begin.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace modtrace {

// How far back from a thread's newest sequence number boundaries are known; a bit for each number.
constexpr uint64_t kSequenceWindow = 1 << 20;

// A bit set over the last sequence numbers of a thread, and above it a bit for each of its words that is not empty, so
// that to look through a long range takes no longer than through a short one. Used by that thread alone.
class SequenceBoundaries {
 public:
  // Notes that the nodes from this number on belong to another call than those before it.
  void add(uint64_t sequence) {
    if (sequence == newest_) return;
    if (words_ == nullptr || sequence > newest_) advance(sequence);
    if (words_ == nullptr) return;
    words_[word_index(sequence)] |= bit(sequence);
    filled()[word_index(sequence) / 64] |= bit(word_index(sequence));
  }

  // Makes a boundary of each number in [first, last]: each of these nodes is a segment of its own.
  void add_all(uint64_t first, uint64_t last) {
    for (first = std::max(first, last - std::min(last, kSequenceWindow)); first <= last; ++first) add(first);
  }

  // Whether boundaries are known as far back as this number, which is not above the newest.
  bool reaches(uint64_t sequence) const { return newest_ / 64 - sequence / 64 < kWords; }

  // Whether there is one in [first, last], which the window reaches. Only where allocated().
  bool any(uint64_t first, uint64_t last) const {
    const uint64_t first_word = first / 64, last_word = last / 64;
    const uint64_t from_first = ~uint64_t{0} << first % 64, up_to_last = ~uint64_t{0} >> (63 - last % 64);
    if (first_word == last_word) return (words_[first_word % kWords] & from_first & up_to_last) != 0;
    if ((words_[first_word % kWords] & from_first) != 0 || (words_[last_word % kWords] & up_to_last) != 0) return true;
    for (uint64_t word = first_word + 1; word < last_word;) {
      // All words of the range that one word of the upper level has a bit for.
      const uint64_t count = std::min(64 - word % 64, last_word - word);
      const uint64_t bits = filled()[word % kWords / 64] >> word % 64;
      if ((bits & (~uint64_t{0} >> (64 - count))) != 0) return true;
      word += count;
    }
    return false;
  }

  // False before the first boundary, and where there is no memory for them.
  bool allocated() const { return words_ != nullptr; }

  void reset() {
    words_.reset();
    newest_ = kNone;
  }

 private:
  static constexpr uint64_t kWords = kSequenceWindow / 64;
  static constexpr uint64_t kNone = ~uint64_t{0};

  struct Free {
    void operator()(uint64_t* words) const { std::free(words); }
  };

  static uint64_t bit(uint64_t index) { return uint64_t{1} << index % 64; }
  static uint64_t word_index(uint64_t sequence) { return sequence / 64 % kWords; }
  uint64_t* filled() const { return words_.get() + kWords; }

  // Moves the window up to this number, and clears the words that enter it.
  void advance(uint64_t sequence) {
    const uint64_t target = sequence / 64;
    if (words_ == nullptr) {
      // Pages of it that are never written take no memory.
      words_.reset(static_cast<uint64_t*>(std::calloc(kWords + kWords / 64, sizeof(uint64_t))));
    } else {
      uint64_t cleared = newest_ / 64;
      if (target - cleared > kWords) cleared = target - kWords;
      while (cleared != target) {
        const uint64_t index = ++cleared % kWords;
        words_[index] = 0;
        filled()[index / 64] &= ~bit(index);
      }
    }
    newest_ = sequence;
  }

  uint64_t newest_ = kNone;
  std::unique_ptr<uint64_t[], Free> words_;
};

}  // namespace modtrace
