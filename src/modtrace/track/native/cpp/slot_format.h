// The format of one event in the ring; ring/slot_format.py says more of each field, and a test compares the two.

#pragma once

#include <atomic>
#include <cstdint>

namespace modtrace {

// The fields of meta, from the lowest bit up. The topmost bit stays 0, so that meta is never negative.
constexpr int kNameBits = 24;
constexpr int kThreadBits = 16;
constexpr int kThreadShift = kNameBits;
constexpr int kKindBits = 8;
constexpr int kKindShift = kThreadShift + kThreadBits;
constexpr int kLapBits = 15;
constexpr uint64_t kLapMask = (uint64_t{1} << kLapBits) - 1;
constexpr int kLapShift = kKindShift + kKindBits;

// The name of what belongs to no module.
constexpr int64_t kNoName = (int64_t{1} << kNameBits) - 1;

// The name field of a node's event: the graph task, and above that the thread that made the node.
constexpr int kGraphTaskBits = 8;
constexpr uint64_t kGraphTaskMask = (uint64_t{1} << kGraphTaskBits) - 1;
constexpr int kForwardThreadShift = kGraphTaskBits;
constexpr int kForwardThreadBits = 16;
constexpr uint64_t kForwardThreadMask = (uint64_t{1} << kForwardThreadBits) - 1;

// The value of a call's event: the sequence number, and above that the call's index.
constexpr int kSequenceBits = 38;
constexpr uint64_t kSequenceMask = (uint64_t{1} << kSequenceBits) - 1;
constexpr int kCallIndexBits = 25;
constexpr uint64_t kCallIndexMask = (uint64_t{1} << kCallIndexBits) - 1;

// The value of a SEGMENT_BEGIN: the sequence number, and above that the backward pass.
constexpr int kBackwardPassBits = 25;
constexpr uint64_t kBackwardPassMask = (uint64_t{1} << kBackwardPassBits) - 1;

// The name of a DEVICE_QUEUED and a DEVICE_STREAM: the number of the stream, and above that the device.
constexpr int kStreamNumberBits = 16;

// The name of a DEVICE_REACHED: the lower bits of the event's number.
constexpr int64_t kEventNumberMask = (int64_t{1} << kNameBits) - 1;

// In the value of a COLLECTIVE_EXIT: a device runs it, and the call left nothing by which a thread could wait for it.
constexpr int64_t kNotAwaitedBit = int64_t{1} << 62;

// How long an event has to be asked for until a DEVICE_PENDING tells it first; then whenever that has doubled.
constexpr int64_t kDevicePendingNs = 100'000'000;

// The name of a DEVICE_CLOCK is a width in ns; its value: what the device's clock showed, and above that the device.
constexpr int kDeviceTimeBits = 55;

// The kinds that are written here. Python writes the others, by write_event.
enum Kind : int64_t {
  kForwardEnter = 1,
  kForwardExit = 2,
  kRecomputeEnter = 3,
  kRecomputeExit = 4,
  kNodeBegin = 5,
  kNodeEnd = 6,
  kGraphBuilt = 7,
  kBackwardOver = 9,
  kStep = 10,
  kAccumulateEnd = 14,
  kSegmentBegin = 15,
  kPassBegin = 16,
  kPassEnd = 17,
  kOptimizerStep = 18,
  kCollectiveEnter = 20,
  kCollectiveExit = 21,
  kCollectiveDone = 22,
  kWaitEnter = 23,
  kWaitExit = 24,
  kDeviceQueued = 25,
  kDeviceReached = 26,
  kDeviceClock = 27,
  kDeviceStream = 28,
  kDevicePending = 29,
  kGradients = 30,
};

// One event. Words are atomic so that a reader beside the writer never sees half a word.
struct Slot {
  std::atomic<int64_t> meta, time, value, stamp;
};

// All of the above by name, for the test.
struct NamedConstant {
  const char* name;
  int64_t value;
};

constexpr NamedConstant kSlotFormat[] = {
    {"NAME_BITS", kNameBits},
    {"THREAD_BITS", kThreadBits},
    {"THREAD_SHIFT", kThreadShift},
    {"KIND_BITS", kKindBits},
    {"KIND_SHIFT", kKindShift},
    {"LAP_BITS", kLapBits},
    {"LAP_MASK", kLapMask},
    {"LAP_SHIFT", kLapShift},
    {"NO_NAME", kNoName},
    {"GRAPH_TASK_BITS", kGraphTaskBits},
    {"GRAPH_TASK_MASK", kGraphTaskMask},
    {"FORWARD_THREAD_SHIFT", kForwardThreadShift},
    {"FORWARD_THREAD_BITS", kForwardThreadBits},
    {"FORWARD_THREAD_MASK", kForwardThreadMask},
    {"SEQUENCE_BITS", kSequenceBits},
    {"SEQUENCE_MASK", kSequenceMask},
    {"CALL_INDEX_BITS", kCallIndexBits},
    {"CALL_INDEX_MASK", kCallIndexMask},
    {"BACKWARD_PASS_BITS", kBackwardPassBits},
    {"BACKWARD_PASS_MASK", kBackwardPassMask},
    {"STREAM_NUMBER_BITS", kStreamNumberBits},
    {"EVENT_NUMBER_MASK", kEventNumberMask},
    {"DEVICE_TIME_BITS", kDeviceTimeBits},
    {"NOT_AWAITED_BIT", kNotAwaitedBit},
    {"DEVICE_PENDING_NS", kDevicePendingNs},
    {"FORWARD_ENTER", kForwardEnter},
    {"FORWARD_EXIT", kForwardExit},
    {"RECOMPUTE_ENTER", kRecomputeEnter},
    {"RECOMPUTE_EXIT", kRecomputeExit},
    {"NODE_BEGIN", kNodeBegin},
    {"NODE_END", kNodeEnd},
    {"GRAPH_BUILT", kGraphBuilt},
    {"BACKWARD_OVER", kBackwardOver},
    {"STEP", kStep},
    {"ACCUMULATE_END", kAccumulateEnd},
    {"SEGMENT_BEGIN", kSegmentBegin},
    {"PASS_BEGIN", kPassBegin},
    {"PASS_END", kPassEnd},
    {"OPTIMIZER_STEP", kOptimizerStep},
    {"COLLECTIVE_ENTER", kCollectiveEnter},
    {"COLLECTIVE_EXIT", kCollectiveExit},
    {"COLLECTIVE_DONE", kCollectiveDone},
    {"WAIT_ENTER", kWaitEnter},
    {"WAIT_EXIT", kWaitExit},
    {"DEVICE_QUEUED", kDeviceQueued},
    {"DEVICE_REACHED", kDeviceReached},
    {"DEVICE_CLOCK", kDeviceClock},
    {"DEVICE_STREAM", kDeviceStream},
    {"DEVICE_PENDING", kDevicePending},
    {"GRADIENTS", kGradients},
};

}  // namespace modtrace
