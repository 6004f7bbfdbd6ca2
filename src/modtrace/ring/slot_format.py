"""The format of one event: a slot of four 64-bit integers, the same for both engines.

- meta: `lap << LAP_SHIFT | kind << KIND_SHIFT | thread << THREAD_SHIFT | name`
- time: monotonic nanoseconds
- value: by kind, see `Kind`
- stamp: the event's serial number plus one; 0 in a slot that was never written

The lap is how often the ring had been filled before, modulo `1 << LAP_BITS`. Meta is written first and the stamp last;
a reader copies the stamp first and meta last. A slot is whole where the lap in meta is the lap of the stamp, so torn
and overwritten slots are recognized without a lock.

The build of the native engine makes a C++ header of this file.
"""

from dataclasses import dataclass
from enum import IntEnum

from .._typing import AnyArray, Int8Array, Int32Array, Int64Array

WORDS_PER_SLOT = 4
SLOT_BYTES = 8 * WORDS_PER_SLOT

# The fields of meta, from the lowest bit up. The topmost bit stays 0, so that meta is never negative.
NAME_BITS = 24
NAME_MASK = (1 << NAME_BITS) - 1
THREAD_BITS = 16
THREAD_MASK = (1 << THREAD_BITS) - 1
THREAD_SHIFT = NAME_BITS
KIND_BITS = 8
KIND_MASK = (1 << KIND_BITS) - 1
KIND_SHIFT = THREAD_SHIFT + THREAD_BITS
LAP_BITS = 15
LAP_MASK = (1 << LAP_BITS) - 1
LAP_SHIFT = KIND_SHIFT + KIND_BITS

NO_NAME = NAME_MASK
"""The name of what belongs to no module."""

# The name field of a node's event: the graph task that runs it, and above that the thread that made the node, as torch
# numbers it. Both wrap at their width.
GRAPH_TASK_BITS = 8
GRAPH_TASK_MASK = (1 << GRAPH_TASK_BITS) - 1
FORWARD_THREAD_SHIFT = GRAPH_TASK_BITS
FORWARD_THREAD_BITS = 16
FORWARD_THREAD_MASK = (1 << FORWARD_THREAD_BITS) - 1

# The value of a call's event: the autograd sequence number of its thread, and above that the call's index among the
# calls of its name. Both wrap at their width.
SEQUENCE_BITS = 38
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
CALL_INDEX_BITS = 25
CALL_INDEX_MASK = (1 << CALL_INDEX_BITS) - 1

# The value of a `CALL_BACKWARD`: the key of the call, and above that the graph task. A name and a key tell a call: the
# key is its index, and RECOMPUTE_BIT if a checkpoint ran it again.
RECOMPUTE_BIT = 1 << CALL_INDEX_BITS
CALL_KEY_BITS = CALL_INDEX_BITS + 1
CALL_KEY_MASK = (1 << CALL_KEY_BITS) - 1

# The value of a `SEGMENT_BEGIN`: a sequence number, and above that the backward pass, which wraps at its width.
BACKWARD_PASS_BITS = 25
BACKWARD_PASS_MASK = (1 << BACKWARD_PASS_BITS) - 1

# The name of a `DEVICE_QUEUED` and a `DEVICE_STREAM`: the number of a stream, and above that the index of the device.
STREAM_NUMBER_BITS = 16
STREAM_NUMBER_MASK = (1 << STREAM_NUMBER_BITS) - 1

# The name of a `DEVICE_REACHED`: the lower bits of the event's number.
EVENT_NUMBER_MASK = NAME_MASK

# The value of a `DEVICE_CLOCK`: what the device's clock showed, and above that the index of the device.
DEVICE_TIME_BITS = 55
DEVICE_TIME_MASK = (1 << DEVICE_TIME_BITS) - 1

# The value of a `COLLECTION`: the generation, above it how many objects were collected (at most `COLLECTED_MASK`),
# above that the nanoseconds that it took.
GENERATION_BITS = 2
GENERATION_MASK = (1 << GENERATION_BITS) - 1
COLLECTED_BITS = 20
COLLECTED_MASK = (1 << COLLECTED_BITS) - 1

MIN_COLLECTION_NS = 100_000
"""A shorter collection has no event: those of the young generation are many, and take microseconds."""

DEVICE_PENDING_NS = 100_000_000
"""How long a device is asked for an event before the first `DEVICE_PENDING`; each next one after twice the time."""

NOT_AWAITED_BIT = 1 << 62
"""In the value of a `COLLECTIVE_EXIT`: a device runs it, and the call left nothing by which a thread could wait."""

WITH_GRADIENTS_BIT = 1 << 62
"""In the value of an `OPERATOR`: gradients are enabled."""

ABANDONED_BIT = 1 << 62
"""In the value of a `BACKWARD_OVER`: the graph task had ended by an exception some time before."""


ALLOCATED = "allocated"
"""The text of the counter of what tensors hold on the CPU, in bytes: at each event before which it changed, and before
that the most since the last sample, if that was more."""
CUDA_ALLOCATED = "cuda allocated"
"""The same of one GPU: it follows that of the CPU once the process allocates on a GPU."""
REFUSED = "could not be allocated"
"""The text of the counter of what could not be allocated, in bytes."""


class Kind(IntEnum):
    """The kind of an event, with what its value holds, and its name where that is not a module's."""

    FORWARD_ENTER = 1
    """A call begins. Value: call index · sequence number of the thread."""
    FORWARD_EXIT = 2
    """It ends. Value: the same."""
    RECOMPUTE_ENTER = 3
    """A call that a checkpoint runs again begins. Value: index among these of its name · sequence number."""
    RECOMPUTE_EXIT = 4
    """It ends. Value: the same."""
    NODE_BEGIN = 5
    """An autograd node begins to run. Value: its sequence number; name: forward thread · graph task."""
    NODE_END = 6
    """It ends. Value and name: the same."""
    GRAPH_BUILT = 7
    """Beside the begin and the end of a node that builds a graph. Value: sequence number of the thread; no name."""
    CALL_BACKWARD = 8
    """The nodes of a call run from now on (portable engine). Value: graph task · call key; no name: no module's."""
    BACKWARD_OVER = 9
    """A backward is over. Value: graph task or backward pass, perhaps with ABANDONED_BIT; no name."""
    STEP = 10
    """A training step ended. Value: its number; no name."""
    MARK = 11
    """A mark of the user's or a sync mark. Name: a text."""
    COUNTER = 12
    """A counter was sampled. Value: the sample; name: a text."""
    SHAPES = 13
    """The call entered just before on this thread has these inputs. Name: a text."""
    ACCUMULATE_END = 14
    """An AccumulateGrad ended, which counts to the node before it. Name: like a node's."""
    SEGMENT_BEGIN = 15
    """The nodes of a segment run from now on (native engine). Value: backward pass · sequence number of the first."""
    PASS_BEGIN = 16
    """A thread calls what runs a backward pass. Value: number of this call in the recording's process; no name."""
    PASS_END = 17
    """It returned or raised; of several of one number the first counts. Value: the same."""
    OPTIMIZER_STEP = 18
    """An optimizer stepped. Value: number of the training step that it belongs to, from 0; no name."""
    COLLECTIVE_ENTER = 20
    """A collective, or a send or receive, is called. Value: its counter; name: a text, see `collective_text`."""
    COLLECTIVE_EXIT = 21
    """The call returns. Value: bytes of the larger of what goes in and what comes out on this rank, `NOT_AWAITED_BIT`;
    name: the same."""
    COLLECTIVE_DONE = 22
    """It is complete, at any later time; the thread is the one that called it. Value and name: as of its enter."""
    WAIT_ENTER = 23
    """A thread waits for a collective. Value and name: as of its enter; -1 and no name where it is not known."""
    WAIT_EXIT = 24
    """It has waited. Value and name: the same."""
    DEVICE_QUEUED = 25
    """An event of a device follows what the thread wrote before. Value: its number, from 0; name: stream and device; no
    name where it was dropped, as too many had not been read."""
    DEVICE_REACHED = 26
    """The device came by it. Value: ns of the device's clock; name: lower bits of its number; thread: who queued it."""
    DEVICE_CLOCK = 27
    """A device's clock was read. Value: device · what it showed, between this event's time and `name` ns before it."""
    DEVICE_STREAM = 28
    """Which stream a number means. Value: torch's id of it; name: as of DEVICE_QUEUED."""
    DEVICE_PENDING = 29
    """A device had not reached an event when it was asked. Value: the event's number; name: like DEVICE_QUEUED's."""
    GRADIENTS = 30
    """An outermost backward pass that builds no graph has given gradients to leaf tensors. Value: how many such passes
    came before; name: 0 if they were added to `.grad`, 1 if they were returned. After a `STEP` or an `OPTIMIZER_STEP`
    there is none."""
    COLLECTION = 31
    """Python collected garbage on this thread until now, for at least `MIN_COLLECTION_NS`. Value: duration in ns ·
    objects collected · generation; no name."""
    EVAL_ENTER = 32
    """Instead of a FORWARD_ENTER: a call begins that is in no other call, and its module is in eval mode."""
    OPERATOR = 33
    """An operator that has a formula ran on this thread, in no other one. Value: the number of its record, perhaps with
    WITH_GRADIENTS_BIT; no name."""
    COUNTING = 34
    """From now on operators are counted, or are not any more. Value: 1 or 0; no name."""
    INPUTS = 35
    """The call entered just before on this thread is outermost. Value: number of its module, modes and shapes of
    inputs, the same for calls that are alike; no name."""
    HELD = 36
    """What tensors hold that calls of a module allocated, outside of inner ones, has changed since the last. Value:
    bytes, above two bits: 1 for what nodes of backward allocated, 2 for the step of an optimizer, 3 for parameters of
    modules that were called; no name: no call of a module allocated it, or it is of a parameter."""
    SAVED = 37
    """What calls of a module, in a forward with gradients and outside of inner ones, have allocated so far that was
    freed in or after a backward pass that began later. Value: bytes; before such events, no name: the number of passes
    so far."""
    HELD_AT_PEAK = 38
    """What these held when most was held so far: four events together. Value: bytes, above two bits: 0 for all that was
    held, 1 to 3 as in HELD; no name."""
    PASS_GRAPH = 39
    """The pass begun just before on this thread goes through this graph. Value: number of the graph with its shapes and
    of the gradients that are asked for, the same for passes that are alike; no name."""
    RANGE_BEGIN = 40
    """A range begins. Value: its number, which no other range has; name: a text, see `range_text`."""
    RANGE_END = 41
    """It ends, perhaps because another thread ends it. Value and name: the same."""
    GREENLET_SUSPENDED = 42
    """This greenlet stops, and one that is in no call goes on. Value: sequence number of the OS thread; no name."""
    GREENLET_RESUMED = 43
    """This greenlet goes on, and so does its innermost call. Value: the same; no name."""


CALL_ENTER_KINDS = (Kind.FORWARD_ENTER, Kind.EVAL_ENTER, Kind.RECOMPUTE_ENTER)
CALL_EXIT_KINDS = (Kind.FORWARD_EXIT, Kind.RECOMPUTE_EXIT)
COMMUNICATION_KINDS = (
    *(Kind.COLLECTIVE_ENTER, Kind.COLLECTIVE_EXIT, Kind.COLLECTIVE_DONE),
    *(Kind.WAIT_ENTER, Kind.WAIT_EXIT),
)
"""The kinds that say what a thread does of torch.distributed; no module's and no node's."""
GREENLET_KINDS = (Kind.GREENLET_SUSPENDED, Kind.GREENLET_RESUMED)
"""The kinds that say which greenlet makes a thread's nodes from now on."""
RANGE_KINDS = (Kind.RANGE_BEGIN, Kind.RANGE_END)
"""The kinds that say in which named range a thread is; no module's and no node's."""
FLOP_KINDS = (Kind.OPERATOR, Kind.COUNTING, Kind.INPUTS, Kind.PASS_GRAPH)
"""The kinds that say what operators cost; no module's and no node's either."""
_DEVICE_READER_KINDS = (Kind.DEVICE_REACHED, Kind.DEVICE_CLOCK, Kind.DEVICE_STREAM, Kind.DEVICE_PENDING)
DEVICE_KINDS = (Kind.DEVICE_QUEUED, *_DEVICE_READER_KINDS)
"""The kinds that say when a device came by; no module's and no node's either."""
KINDS_OF_OTHER_THREADS = (Kind.COLLECTIVE_DONE, Kind.RANGE_END, *_DEVICE_READER_KINDS)
"""The kinds that are written by others than the thread that they name, at any later time."""


@dataclass(frozen=True, slots=True)
class Events:
    """Whole events in serial order, as columns of equal length.

    Attributes:
        serial: int64, ascending, with gaps where slots were torn.
        time: int64, monotonic nanoseconds.
        kind: int8, a `Kind`.
        thread: int32, index into the threads of the name table.
        name: int32, index into its names or texts, by kind.
        value: int64, by kind.
    """

    serial: Int64Array
    time: Int64Array
    kind: Int8Array
    thread: Int32Array
    name: Int32Array
    value: Int64Array

    def __len__(self) -> int:
        return len(self.serial)

    def take(self, index: AnyArray | slice) -> "Events":
        """Return the events at `index` (positions, a mask or a range)."""
        return Events(*(getattr(self, field)[index] for field in self.__slots__))
