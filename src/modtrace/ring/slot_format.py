"""The format of one event: a slot of four 64-bit integers, the same for both engines.

- meta: `lap << LAP_SHIFT | kind << KIND_SHIFT | thread << THREAD_SHIFT | name`
- time: monotonic nanoseconds
- value: by kind, see `Kind`
- stamp: the event's serial number plus one; 0 in a slot that was never written

The lap is the number of times that the ring had been filled before, modulo `1 << LAP_BITS`. The writer writes meta
first and the stamp last; a reader copies the stamp first and meta last. A slot is complete if meta and the stamp have
the same lap, so readers recognize torn and overwritten slots without a lock.

The build of the native engine makes a C++ header from this file.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from .._arrays import AnyArray, Int8Array, Int32Array, Int64Array

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
"""The name of an event that belongs to no module."""

# The name field of a node's event: the graph task that runs the node, and above it torch's number of the thread that
# made the node. Both wrap at their width.
GRAPH_TASK_BITS = 8
GRAPH_TASK_MASK = (1 << GRAPH_TASK_BITS) - 1
FORWARD_THREAD_SHIFT = GRAPH_TASK_BITS
FORWARD_THREAD_BITS = 16
FORWARD_THREAD_MASK = (1 << FORWARD_THREAD_BITS) - 1

# The value of a call's event: the autograd sequence number of its thread, and above it the call's index among the calls
# of its name. Both wrap at their width.
SEQUENCE_BITS = 38
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
CALL_INDEX_BITS = 25
CALL_INDEX_MASK = (1 << CALL_INDEX_BITS) - 1

# The value of a `CALL_BACKWARD`: the key of the call, and above it the graph task. A name and a key identify a call:
# the key is the call's index, with RECOMPUTE_BIT if a checkpoint ran it again.
RECOMPUTE_BIT = 1 << CALL_INDEX_BITS
CALL_KEY_BITS = CALL_INDEX_BITS + 1
CALL_KEY_MASK = (1 << CALL_KEY_BITS) - 1

# The value of a `SEGMENT_BEGIN`: a sequence number, and above it the backward pass, which wraps at its width.
BACKWARD_PASS_BITS = 25
BACKWARD_PASS_MASK = (1 << BACKWARD_PASS_BITS) - 1

# The name of a `DEVICE_QUEUED` and a `DEVICE_STREAM`: the number of a stream, and above it the index of the device.
STREAM_NUMBER_BITS = 16
STREAM_NUMBER_MASK = (1 << STREAM_NUMBER_BITS) - 1

# The name of a `DEVICE_REACHED`: the lower bits of the event's number.
EVENT_NUMBER_MASK = NAME_MASK

# The value of a `DEVICE_CLOCK`: the time of the device's clock, and above it the index of the device.
DEVICE_TIME_BITS = 55
DEVICE_TIME_MASK = (1 << DEVICE_TIME_BITS) - 1

# The value of a `COLLECTION`: the generation, above it the number of collected objects (up to `COLLECTED_MASK`), above
# it the duration in ns, and above it one of two bits; older rings have neither bit.
GENERATION_BITS = 2
GENERATION_MASK = (1 << GENERATION_BITS) - 1
COLLECTED_BITS = 20
COLLECTED_MASK = (1 << COLLECTED_BITS) - 1
AUTOMATIC_BIT = 1 << 62
"""Bit of a collection that Python started by itself, after many allocations."""
REQUESTED_BIT = 1 << 61
"""Bit of a collection that gc.collect() started."""

# The value of a `HELD` and a `HELD_AT_PEAK`: the holder of memory outside the calls of modules, and above it the bytes.
HOLDER_BITS = 2
HOLDER_MASK = (1 << HOLDER_BITS) - 1

MIN_COLLECTION_NS = 100_000
"""Minimum duration of a collection with an event; the many collections of the young generation last microseconds."""

DEVICE_PENDING_NS = 100_000_000
"""Time from a device event's queueing to its first `DEVICE_PENDING`; the time to each next one doubles."""

NOT_AWAITED_BIT = 1 << 62
"""Bit in the value of a `COLLECTIVE_EXIT`: a device runs the collective, and the call left no handle to wait for it."""

WITH_GRADIENTS_BIT = 1 << 62
"""Bit in the value of an `OPERATOR`: gradients are enabled."""

ABANDONED_BIT = 1 << 62
"""Bit in the value of a `BACKWARD_OVER`: the graph task had ended earlier, by an exception."""


ALLOCATED = "allocated"
"""Text of the counter of the bytes that tensors hold on the CPU. After a change, a sample precedes the next event, and
a sample of the maximum since the last sample precedes that sample, if larger."""
CUDA_ALLOCATED = "cuda allocated"
"""Text of the counter of the bytes on one GPU; it replaces the CPU's counter once the process allocates on a GPU."""
REFUSED = "could not be allocated"
"""Text of the counter of the bytes that could not be allocated."""


NameField = Literal["", "module", "module?", "text", "text?", "number"]
"""The content of an event's name field: the id of a module's name, the id of a text, or a number. With `?` it may be
NO_NAME; empty means NO_NAME in every event."""

_CALL = "call index · sequence number of the thread"
_CALLS, _PASSES, _NETWORK = "module_calls.cpp engine.py", "backward.cpp engine.py", "collectives.cpp collectives.py"


class Kind(IntEnum):
    """The kind of an event: a table of the meaning of each kind, and the files that write and read it.

    Attributes:
        topic: the subject, by which most sets of kinds below are made.
        layout: the content of the value, from the highest bits down; bits and widths are defined above.
        name_field: the content of the name field.
        writers: the files of `track/` or `recording/` that write the kind.
        reader: the file of `timeline/decode/` or `live/` that interprets the kind.
        by_others: whether a thread can write the event for the thread that it names, at any later time.
    """

    topic: str
    layout: str
    name_field: NameField
    writers: str
    reader: str
    by_others: bool

    def __new__(
        cls,
        number: int,
        topic: str = "",
        layout: str = "",
        name_field: NameField = "",
        writers: str = "",
        reader: str = "",
        by_others: bool = False,
    ) -> "Kind":
        """Return the member for a row of the table."""
        kind = int.__new__(cls, number)
        kind._value_, kind.topic, kind.layout, kind.name_field = number, topic, layout, name_field
        kind.writers, kind.reader, kind.by_others = writers, reader, by_others
        return kind

    FORWARD_ENTER = 1, "call", _CALL, "module", _CALLS, "intervals"
    """A call starts."""
    FORWARD_EXIT = 2, "call", _CALL, "module", _CALLS, "intervals"
    """A call ends."""
    RECOMPUTE_ENTER = 3, "call", _CALL, "module", _CALLS, "intervals"
    """A call that a checkpoint runs again starts. Its index counts the recomputed calls of its name."""
    RECOMPUTE_EXIT = 4, "call", _CALL, "module", _CALLS, "intervals"
    """A call that a checkpoint runs again ends."""
    NODE_BEGIN = 5, "node", "its sequence number", "number", "backward.cpp", "intervals"
    """An autograd node starts to run. Name: forward thread · graph task."""
    NODE_END = 6, "node", "value of its NODE_BEGIN", "number", "backward.cpp", "intervals"
    """An autograd node ends. Name: as in its NODE_BEGIN."""
    GRAPH_BUILT = 7, "node", "sequence number of the thread", "", "backward.cpp", "attribution"
    """Written with the start and the end of a node that builds a graph."""
    CALL_BACKWARD = 8, "node", "graph task · call key", "module?", "passes.py", "intervals"
    """The nodes of a call run from now on (Python engine). Without a name: the nodes of no module."""
    BACKWARD_OVER = 9, "node", "ABANDONED_BIT · graph task or backward pass", "", "backward.cpp passes.py", "intervals"
    """A backward is over."""
    STEP = 10, "step", "its number", "", "recording.py", "analysis"
    """A training step ended."""
    MARK = 11, "mark", "0", "text", "recording.py event_sink.py", "from_ring"
    """A mark of the user, or a sync mark."""
    COUNTER = 12, "memory", "the sample", "text", "memory.cpp sampling.py", "from_ring"
    """A counter was sampled."""
    SHAPES = 13, "mark", "0", "text", "sampling.py", "from_ring"
    """The inputs of the call that was entered just before on this thread."""
    ACCUMULATE_END = 14, "node", "its sequence number", "number", "backward.cpp", "intervals"
    """An AccumulateGrad ended; it belongs to the node before it. Name: as in a node's event."""
    SEGMENT_BEGIN = 15, "node", "backward pass · sequence number of its first", "", "backward.cpp", "intervals"
    """The nodes of a segment run from now on (native engine)."""
    PASS_BEGIN = 16, "pass", "number of this call in the process", "", _PASSES, "analysis"
    """A thread calls the function that runs a backward pass."""
    PASS_END = 17, "pass", "value of its PASS_BEGIN", "", _PASSES, "analysis"
    """The call of a PASS_BEGIN returned or raised; the first PASS_END of a number counts."""
    OPTIMIZER_STEP = 18, "step", "number of its training step, from 0", "", "recording.py", "analysis"
    """An optimizer stepped."""
    COLLECTIVE_ENTER = 20, "communication", "its counter", "text?", _NETWORK, "range_slices"
    """A collective, or a send or receive, is called. The text: see `event_text`."""
    COLLECTIVE_EXIT = 21, "communication", "NOT_AWAITED_BIT · bytes", "text?", _NETWORK, "range_slices"
    """The call returns. The bytes are the larger of its inputs and its outputs on this rank. The text of this event and
    of the next three kinds is the same as in the COLLECTIVE_ENTER."""
    COLLECTIVE_DONE = 22, "communication", "value of its enter", "text?", "collectives.cpp", "range_slices", True
    """A collective is complete, at any later time; the event's thread is the thread that called it."""
    WAIT_ENTER = 23, "communication", "value of the COLLECTIVE_ENTER, or -1", "text?", _NETWORK, "range_slices"
    """A thread waits for a collective. For an unknown collective the value is -1, and there is no name."""
    WAIT_EXIT = 24, "communication", "value of the WAIT_ENTER", "text?", _NETWORK, "range_slices"
    """The wait ends."""
    DEVICE_QUEUED = 25, "device", "its number, from 0", "number", "times.cpp", "analysis"
    """The thread queued a device event behind its last event in the ring. Name: device · stream; NO_NAME if the device
    event was dropped because too many had not been read."""
    DEVICE_REACHED = 26, "device", "ns of the device's clock", "number", "reader.cpp", "analysis", True
    """The device has reached a device event. Name: lower bits of its number; thread: the thread that queued it."""
    DEVICE_CLOCK = 27, "device", "device · its clock's time", "number", "reader.cpp", "analysis", True
    """A device's clock was read, between this event's time and `name` ns before it."""
    DEVICE_STREAM = 28, "device", "torch's id of the stream", "number", "reader.cpp times.cpp", "analysis", True
    """The stream of a stream number. Name: as in DEVICE_QUEUED."""
    DEVICE_PENDING = 29, "device", "the device event's number", "number", "reader.cpp", "streams", True
    """A device had not reached a device event when it was asked. Name: as in DEVICE_QUEUED."""
    GRADIENTS = 30, "step", "number of such passes before", "number", _PASSES, "analysis"
    """An outermost backward pass that builds no graph has given gradients to leaf tensors. Name: 0 if it added them to
    `.grad`, 1 if it returned them. Once a `STEP` or an `OPTIMIZER_STEP` came, no pass has this event."""
    COLLECTION = (
        31,
        "collection",
        "trigger · ns · objects · generation",
        "",
        "module.cpp engine.py",
        "range_slices",
        True,
    )
    """Python collected garbage on this thread until now, for `MIN_COLLECTION_NS` or longer. The Python engine writes
    the event later, maybe from another thread."""
    EVAL_ENTER = 32, "call", _CALL, "module", _CALLS, "range_slices"
    """Replaces a FORWARD_ENTER: an outermost call of a module in eval mode starts."""
    OPERATOR = 33, "FLOPs", "WITH_GRADIENTS_BIT · number of its record", "", "flops.cpp", "span_costs"
    """An operator with a FLOP formula ran on this thread, outside any other such operator."""
    COUNTING = 34, "FLOPs", "1 or 0", "", "flops.cpp", "span_costs"
    """Counting of operators starts (1) or stops (0)."""
    INPUTS = 35, "FLOPs", "number of module, modes and shapes", "", "module_calls.cpp", "span_costs"
    """The call that was entered just before on this thread is outermost. Equal calls have the same number."""
    HELD = 36, "memory", "bytes · holder", "module?", "memory.h", "held_memory"
    """The bytes changed that a module's calls, without their inner calls, allocated and tensors still hold. Without a
    name, the holder is 1 for nodes of backward, 2 for the step of an optimizer, 3 for parameters of modules that were
    called, and 0 for all other memory."""
    SAVED = 37, "memory", "bytes, or number of passes so far", "module?", "memory.h", "held_memory"
    """The bytes that a module's calls have saved for backward so far: a forward with gradients allocated them, outside
    inner calls, and they were freed in or after a later backward pass. An event without a name precedes such events and
    has the number of passes."""
    HELD_AT_PEAK = 38, "memory", "bytes · holder", "", "memory.h", "held_memory"
    """The bytes of a holder at the peak so far, in four events together. The holder is 0 for all bytes, otherwise as in
    HELD."""
    PASS_GRAPH = 39, "FLOPs", "number of graph and asked gradients", "", "backward.cpp", "span_costs"
    """The graph of the pass that started just before on this thread. Passes with equal graphs and shapes have the same
    number."""
    RANGE_BEGIN = 40, "range", "its number", "text", "ranges.cpp ranges.py", "range_slices"
    """A range starts. No other range has its number. The text: see `event_text`."""
    RANGE_END = 41, "range", "value of its RANGE_BEGIN", "text", "ranges.cpp ranges.py", "range_slices", True
    """A range ends; another thread can end it. The text is the same as in its RANGE_BEGIN."""
    GREENLET_SUSPENDED = 42, "greenlet", "sequence number of the OS thread", "", "greenlets.cpp", "attribution"
    """This greenlet stops, and a greenlet outside all calls goes on."""
    GREENLET_RESUMED = 43, "greenlet", "sequence number of the OS thread", "", "greenlets.cpp", "attribution"
    """This greenlet goes on, and with it its innermost call."""


SYNC_PREFIX = "modtrace.sync#"
"""Prefix of the text of a mark that torch.profiler sees too; a number follows."""


def _about(topic: str) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if kind.topic == topic)


CALL_ENTER_KINDS = (Kind.FORWARD_ENTER, Kind.EVAL_ENTER, Kind.RECOMPUTE_ENTER)
CALL_EXIT_KINDS = (Kind.FORWARD_EXIT, Kind.RECOMPUTE_EXIT)
COMMUNICATION_KINDS = _about("communication")
"""The kinds for the calls of torch.distributed on a thread."""
GREENLET_KINDS = _about("greenlet")
"""The kinds for switches of the greenlet that makes a thread's nodes."""
RANGE_KINDS = _about("range")
"""The kinds for the named ranges of a thread."""
FLOP_KINDS = _about("FLOPs")
"""The kinds for the costs of operators."""
DEVICE_KINDS = _about("device")
"""The kinds for the times at which a device reached its events."""
MEMORY_KINDS = _about("memory")
"""The kinds for the bytes that tensors hold, and for samples of counters."""
KINDS_OF_OTHER_THREADS = tuple(kind for kind in Kind if kind.by_others)
"""The kinds that another thread than the named thread can write, at any later time."""


@dataclass(frozen=True, slots=True)
class Events:
    """Complete events in serial order, as columns of equal length."""

    serial: Int64Array  # ascending, with gaps for torn slots
    time_ns: Int64Array  # monotonic clock
    kind: Int8Array  # a `Kind`
    thread: Int32Array  # index into the threads of the name table
    name: Int32Array  # index into its names or texts, by kind
    value: Int64Array  # by kind

    def __len__(self) -> int:
        return len(self.serial)

    def take(self, index: AnyArray | slice) -> "Events":
        """Return the events at `index` (indices, a mask or a slice)."""
        return Events(*(getattr(self, field)[index] for field in self.__slots__))
