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
# above that the nanoseconds that it took, and above these one of two bits; older rings have neither.
GENERATION_BITS = 2
GENERATION_MASK = (1 << GENERATION_BITS) - 1
COLLECTED_BITS = 20
COLLECTED_MASK = (1 << COLLECTED_BITS) - 1
AUTOMATIC_BIT, REQUESTED_BIT = 1 << 62, 1 << 61
"""Python itself began the collection, after so many allocations; or gc.collect() did."""

# The value of a `HELD` and a `HELD_AT_PEAK`: who allocated it outside of calls of modules, and above that the bytes.
HOLDER_BITS = 2
HOLDER_MASK = (1 << HOLDER_BITS) - 1

MIN_COLLECTION_NS = 100_000
"""A shorter collection has no event: those of the young generation are many, and take microseconds."""

DEVICE_PENDING_NS = 100_000_000
"""How long a device is asked for an event before the first `DEVICE_PENDING`; each next one after twice the time."""

NOT_AWAITED_BIT = 1 << 62
"""Bit in the value of a `COLLECTIVE_EXIT`: a device runs it, and the call left nothing by which a thread could wait."""

WITH_GRADIENTS_BIT = 1 << 62
"""Bit in the value of an `OPERATOR`: gradients are enabled."""

ABANDONED_BIT = 1 << 62
"""Bit in the value of a `BACKWARD_OVER`: the graph task had ended by an exception some time before."""


ALLOCATED = "allocated"
"""The text of the counter of what tensors hold on the CPU, in bytes: at each event before which it changed, and before
that the most since the last sample, if that was more."""
CUDA_ALLOCATED = "cuda allocated"
"""The same of one GPU: it follows that of the CPU once the process allocates on a GPU."""
REFUSED = "could not be allocated"
"""The text of the counter of what could not be allocated, in bytes."""


NameField = Literal["", "module", "module?", "text", "text?", "number"]
"""The name field of an event: a module's name, a text, or a number as the kind says. Empty: NO_NAME; `?`: perhaps."""

_CALL = "call index · sequence number of the thread"
_CALLS, _PASSES, _NETWORK = "module_calls.cpp engine.py", "backward.cpp engine.py", "collectives.cpp collectives.py"


class Kind(IntEnum):
    """The kind of an event: a table of what each kind says, and which files write and read it.

    Attributes:
        topic: what it is about; most sets of kinds below are made of it.
        layout: what the value holds, from the highest bits down; bits and widths are above.
        name_field: what the name is.
        writers: the files of `track/` that write it, or of `recording/`.
        reader: the file of `timeline/decode/` that gives it its meaning, or of `live/`.
        by_others: others than the thread that it names can write it, at any later time.
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
        """Return the member of a row."""
        kind = int.__new__(cls, number)
        kind._value_, kind.topic, kind.layout, kind.name_field = number, topic, layout, name_field
        kind.writers, kind.reader, kind.by_others = writers, reader, by_others
        return kind

    FORWARD_ENTER = 1, "call", _CALL, "module", _CALLS, "intervals"
    """A call begins."""
    FORWARD_EXIT = 2, "call", _CALL, "module", _CALLS, "intervals"
    """It ends."""
    RECOMPUTE_ENTER = 3, "call", _CALL, "module", _CALLS, "intervals"
    """A call that a checkpoint runs again begins. Its index is among these of its name."""
    RECOMPUTE_EXIT = 4, "call", _CALL, "module", _CALLS, "intervals"
    """It ends."""
    NODE_BEGIN = 5, "node", "its sequence number", "number", "backward.cpp", "intervals"
    """An autograd node begins to run. Name: forward thread · graph task."""
    NODE_END = 6, "node", "as of its begin", "number", "backward.cpp", "intervals"
    """It ends. Name: as of its begin."""
    GRAPH_BUILT = 7, "node", "sequence number of the thread", "", "backward.cpp", "attribution"
    """Beside the begin and the end of a node that builds a graph."""
    CALL_BACKWARD = 8, "node", "graph task · call key", "module?", "passes.py", "intervals"
    """The nodes of a call run from now on (Python engine). No name: the nodes of no module."""
    BACKWARD_OVER = 9, "node", "ABANDONED_BIT · graph task or backward pass", "", "backward.cpp passes.py", "intervals"
    """A backward is over."""
    STEP = 10, "step", "its number", "", "recording.py", "analysis"
    """A training step ended."""
    MARK = 11, "mark", "0", "text", "recording.py event_sink.py", "from_ring"
    """A mark of the user's or a sync mark."""
    COUNTER = 12, "memory", "the sample", "text", "memory.cpp sampling.py", "from_ring"
    """A counter was sampled."""
    SHAPES = 13, "mark", "0", "text", "sampling.py", "from_ring"
    """The call entered just before on this thread has these inputs."""
    ACCUMULATE_END = 14, "node", "its sequence number", "number", "backward.cpp", "intervals"
    """An AccumulateGrad ended, which counts to the node before it. Name: that of a node's event."""
    SEGMENT_BEGIN = 15, "node", "backward pass · sequence number of its first", "", "backward.cpp", "intervals"
    """The nodes of a segment run from now on (native engine)."""
    PASS_BEGIN = 16, "pass", "number of this call in the process", "", _PASSES, "analysis"
    """A thread calls what runs a backward pass."""
    PASS_END = 17, "pass", "as of its begin", "", _PASSES, "analysis"
    """It returned or raised; of several of one number the first counts."""
    OPTIMIZER_STEP = 18, "step", "number of its training step, from 0", "", "recording.py", "analysis"
    """An optimizer stepped."""
    COLLECTIVE_ENTER = 20, "communication", "its counter", "text?", _NETWORK, "range_slices"
    """A collective, or a send or receive, is called. The text: see `event_text`."""
    COLLECTIVE_EXIT = 21, "communication", "NOT_AWAITED_BIT · bytes", "text?", _NETWORK, "range_slices"
    """The call returns. The bytes are of the larger of what goes in and what comes out on this rank. Its text, and
    those of the next three, are as of its enter."""
    COLLECTIVE_DONE = 22, "communication", "as of its enter", "text?", "collectives.cpp", "range_slices", True
    """It is complete, at any later time; the thread is the one that called it."""
    WAIT_ENTER = 23, "communication", "value of the collective's enter, or -1", "text?", _NETWORK, "range_slices"
    """A thread waits for a collective. If that is not known, the value is -1, and there is no name."""
    WAIT_EXIT = 24, "communication", "value of the wait's enter", "text?", _NETWORK, "range_slices"
    """It has waited."""
    DEVICE_QUEUED = 25, "device", "its number, from 0", "number", "times.cpp", "analysis"
    """An event of a device follows what the thread wrote before. Name: device · stream; if it was dropped, as
    too many had not been read, NO_NAME."""
    DEVICE_REACHED = 26, "device", "ns of the device's clock", "number", "reader.cpp", "analysis", True
    """The device has reached the event. Name: lower bits of its number; thread: who queued it."""
    DEVICE_CLOCK = 27, "device", "device · what its clock showed", "number", "reader.cpp", "analysis", True
    """A device's clock was read, between this event's time and `name` ns before it."""
    DEVICE_STREAM = 28, "device", "torch's id of the stream", "number", "reader.cpp times.cpp", "analysis", True
    """Which stream a number means. Name: as of DEVICE_QUEUED."""
    DEVICE_PENDING = 29, "device", "the event's number", "number", "reader.cpp", "streams", True
    """A device had not reached an event when it was asked. Name: as of DEVICE_QUEUED."""
    GRADIENTS = 30, "step", "how many such passes came before", "number", _PASSES, "analysis"
    """An outermost backward pass that builds no graph has given gradients to leaf tensors. Name: 0 if it added them to
    `.grad`, 1 if it returned them. After a `STEP` or an `OPTIMIZER_STEP` there is none."""
    COLLECTION = (
        31,
        "collection",
        "trigger · ns · objects · generation",
        "",
        "module.cpp engine.py",
        "range_slices",
        True,
    )
    """Python collected garbage on this thread until now, for at least `MIN_COLLECTION_NS`. The Python engine writes it
    later, perhaps from another thread."""
    EVAL_ENTER = 32, "call", _CALL, "module", _CALLS, "range_slices"
    """Instead of a FORWARD_ENTER: a call begins that is in no other call, and its module is in eval mode."""
    OPERATOR = 33, "FLOPs", "WITH_GRADIENTS_BIT · number of its record", "", "flops.cpp", "span_costs"
    """An operator that has a formula ran on this thread, in no other one."""
    COUNTING = 34, "FLOPs", "1 or 0", "", "flops.cpp", "span_costs"
    """From now on operators are counted, or are not any more."""
    INPUTS = 35, "FLOPs", "number of module, modes and shapes", "", "module_calls.cpp", "span_costs"
    """The call entered just before on this thread is outermost. Calls that are alike have the same number."""
    HELD = 36, "memory", "bytes · holder", "module?", "memory.h", "held_memory"
    """The bytes that tensors hold which calls of a module allocated, outside of inner calls, have changed. The holder
    is 1 for what nodes of backward allocated, 2 for the step of an optimizer, 3 for parameters of modules that were
    called. No name: no call of a module allocated it, or it is of a parameter."""
    SAVED = 37, "memory", "bytes, or number of passes so far", "module?", "memory.h", "held_memory"
    """The bytes that calls of a module have saved for backward so far: they were allocated in a forward with gradients,
    outside of inner calls, and freed in or after a later backward pass. An event with no name comes before such events:
    it has the number of passes."""
    HELD_AT_PEAK = 38, "memory", "bytes · holder", "", "memory.h", "held_memory"
    """The bytes that these held when most was held so far: four events together. The holder is 0 for all bytes, else as
    in HELD."""
    PASS_GRAPH = 39, "FLOPs", "number of graph and asked gradients", "", "backward.cpp", "span_costs"
    """The pass begun just before on this thread goes through this graph. Passes that are alike, in shapes too, have the
    same number."""
    RANGE_BEGIN = 40, "range", "its number", "text", "ranges.cpp ranges.py", "range_slices"
    """A range begins. No other range has its number. The text: see `event_text`."""
    RANGE_END = 41, "range", "as of its begin", "text", "ranges.cpp ranges.py", "range_slices", True
    """It ends, perhaps because another thread ends it. The text: as of its begin."""
    GREENLET_SUSPENDED = 42, "greenlet", "sequence number of the OS thread", "", "greenlets.cpp", "attribution"
    """This greenlet stops, and one that is in no call goes on."""
    GREENLET_RESUMED = 43, "greenlet", "sequence number of the OS thread", "", "greenlets.cpp", "attribution"
    """This greenlet goes on, and so does its innermost call."""


SYNC_PREFIX = "modtrace.sync#"
"""The begin of the text of a mark that torch.profiler sees too; a number follows."""


def _about(topic: str) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if kind.topic == topic)


CALL_ENTER_KINDS = (Kind.FORWARD_ENTER, Kind.EVAL_ENTER, Kind.RECOMPUTE_ENTER)
CALL_EXIT_KINDS = (Kind.FORWARD_EXIT, Kind.RECOMPUTE_EXIT)
COMMUNICATION_KINDS = _about("communication")
"""The kinds that say what a thread does of torch.distributed."""
GREENLET_KINDS = _about("greenlet")
"""The kinds that say which greenlet makes a thread's nodes from now on."""
RANGE_KINDS = _about("range")
"""The kinds that say in which named range a thread is."""
FLOP_KINDS = _about("FLOPs")
"""The kinds that say what operators cost."""
DEVICE_KINDS = _about("device")
"""The kinds that say when a device reached what was queued."""
MEMORY_KINDS = _about("memory")
"""The kinds that say what tensors hold, and samples of counters."""
KINDS_OF_OTHER_THREADS = tuple(kind for kind in Kind if kind.by_others)
"""The kinds that are written by others than the thread that they name, at any later time."""


@dataclass(frozen=True, slots=True)
class Events:
    """Whole events in serial order, as columns of equal length."""

    serial: Int64Array  # ascending, with gaps where slots were torn
    time: Int64Array  # monotonic nanoseconds
    kind: Int8Array  # a `Kind`
    thread: Int32Array  # index into the threads of the name table
    name: Int32Array  # index into its names or texts, by kind
    value: Int64Array  # by kind

    def __len__(self) -> int:
        return len(self.serial)

    def take(self, index: AnyArray | slice) -> "Events":
        """Return the events at `index` (positions, a mask or a range)."""
        return Events(*(getattr(self, field)[index] for field in self.__slots__))
