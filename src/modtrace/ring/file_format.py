"""The format of a ring file: a header, slots, and a log of records, which hold the name table.

```
0      magic "MODTRACE" · version u32 · 0 u32 · capacity u64 · slots offset u64 · log offset u64
       metadata length u32 · crc32 of metadata u32 · metadata (JSON)
4096   slots: capacity × 32 bytes
…      log: records of (length u32 · crc32 u32 · JSON), until a length of 0 or the end of the file
```

All numbers are little endian. The metadata's `writer` describes the process that writes the file, see `owner`. The
space of the header, the slots and the first part of the log is reserved when the file is made. So a full disk is an
error at that time, and not a signal while training runs.

A record is one JSON object with a "kind" and the fields of this kind:

| kind       | fields                                                                                                 |
|------------|--------------------------------------------------------------------------------------------------------|
| `name`     | a module's name: `id`, `label`, `fqn`, `class`                                                         |
| `text`     | the text of a mark, a counter, the shapes of a call's inputs, or a collective's name: `id`, `text`     |
| `thread`   | `id`, `name`, `tid` (the operating system's id), `torch_thread_id` (torch's number, -1 if unknown)     |
| `compiled` | `name`: id of a name; `modules`: compiled into it (`blocks.0: Block, …`); `graph`. The last counts     |
| `group`    | a process group of torch.distributed: `name`, `ranks` (global ranks, `0-3,8`), `description`           |
| `operator` | one with certain inputs: `number`, `name`, `device`, `dtype`, `flops` (-1: unknown), `bytes`           |
| `optimizer`| one that stepped: `class`, `tensors`, `how`, `hooks`, `groups`, see `describe_optimizer`               |
| `steps`    | `steps`: number of sampled steps; `notes`: a JSON object, see `STEP_NOTES`. The last counts            |
| `clock`    | `clock`: id of the host's monotonic clock, which the times are on                                      |
| `offset`   | `clock`, `parent`: ids; `time`, `offset`, `bound`, `round_trip`: lead of the parent's clock in ns      |
| `anchor`   | `monotonic`, `wall`: ns on both clocks, read at one moment                                             |
| `stop`     | no fields: the recording was stopped in good order                                                     |

The `graph` of a compiled region has `graph` (dynamo's number), `unknown` (the reason why its nodes are unknown, or
empty), `work` and `kernels`. `work` has for each module its name, its nodes in forward, backward and recompute, and
their FLOPs, -1 if unknown. `kernels` has for each graph that Inductor compiled its `key`, by which a profile names its
calls, `unknown`, and `kernels` in call order: the name, and for each module its index in `work`, the phase, and the
bytes of its nodes. A graph that is noted again, after its backward was compiled, replaces the former note.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from .._errors import RingError
from .slot_format import NO_NAME, SLOT_BYTES

Record = Mapping[str, Any]

MAGIC = b"MODTRACE"
VERSION = 2
HEADER = struct.Struct("<8sIIQQQII")
"""The start of the header, before the metadata."""
SLOTS_OFFSET = 4096
"""Bytes before the first slot of a file."""
LOG_CHUNK_BYTES = 1 << 20
"""Bytes that are reserved for the log at a time; every complete file has the first of these chunks."""
RECORD = struct.Struct("<II")
"""The length and the checksum before each record of the log."""
MAX_RECORD_BYTES = 1 << 20
"""Maximum length of a record: a longer record is not written, and a reader takes it for damage."""
_WRITER = "writer"
FIRST_STEP = "first_step"
"""The key in a ring's metadata for the number of the first step, if known."""
STACKS_SIGNAL = "stacks_signal"
"""The key in a ring's metadata for the number of the signal on which its process writes its Python stacks."""
WORKERS = "workers"
"""The key in a ring's metadata that is 1 if the recordings of DataLoader workers are joined when it is saved."""
MAX_TIME_NS = 1 << 61
"""Times from this one on are damage: sums of a few times must fit 64 bits."""
_PIDS = range(1 << 31)
_TIMES_NS = range(MAX_TIME_NS)
_FIELDS: Mapping[str, Mapping[str, type[str] | range]] = {
    "name": {"label": str, "fqn": str, "class": str},
    "text": {"text": str},
    "thread": {"name": str, "tid": _PIDS, "torch_thread_id": range(-1, 1 << 63)},
    "compiled": {"name": range(NO_NAME), "modules": str},
    "operator": {
        "number": range(1 << 63),
        "name": str,
        "device": str,
        "dtype": str,
        "flops": range(-1, 1 << 63),
        "bytes": range(1 << 63),
    },
    "clock": {"clock": str},
    "offset": {
        "clock": str,
        "parent": str,
        "time": _TIMES_NS,
        "offset": range(-MAX_TIME_NS, MAX_TIME_NS),
        "bound": _TIMES_NS,
        "round_trip": _TIMES_NS,
    },
    "group": {"name": str, "ranks": str, "description": str},
    "anchor": {"monotonic": _TIMES_NS, "wall": _TIMES_NS},
    "optimizer": {},
    "steps": {"steps": range(1 << 63), "notes": str},
    "saved": {},
    "stop": {},
}
"""The allowed values of each field of each kind of record: a text, or an integer in a range."""
_METADATA_FIELDS: Mapping[str, type[str] | range] = {
    "pid": _PIDS,
    "rank": _PIDS,
    "role": str,
    "program": str,
    FIRST_STEP: range(1 << 63),
    STACKS_SIGNAL: range(1, 65),
    WORKERS: range(2),
}
"""The allowed values of the metadata's fields that modtrace reads; other fields are only shown."""
_KINDS_WITH_ID = ("name", "text", "thread")
_MAX_ID_MARGIN = 64
"""Maximum excess of an id over twice the number of records so far."""


class FileHeader(NamedTuple):
    """The header of a ring file."""

    capacity: int  # slots in the ring
    log_start: int  # byte offset of the log
    metadata: Mapping[str, Any]  # the values about the recording, without fields that have impossible values
    # The description of the writing process by `owner.describe_writer`; empty in files of older versions.
    writer: Mapping[str, object]


def pack_header(path: str, capacity: int, metadata: Mapping[str, object], writer: Mapping[str, object]) -> bytes:
    """Return the bytes of a header; raises RingError if the metadata does not fit."""
    text = orjson.dumps({**metadata, _WRITER: writer})
    log_start = SLOTS_OFFSET + capacity * SLOT_BYTES
    head = HEADER.pack(MAGIC, VERSION, 0, capacity, SLOTS_OFFSET, log_start, len(text), zlib.crc32(text))
    if len(head) + len(text) > SLOTS_OFFSET:
        raise RingError(f"{path}: the metadata does not fit the header ({len(text)} bytes)")
    return head + text


def parse_header(path: str, head: bytes) -> FileHeader:
    """Parse the first `SLOTS_OFFSET` bytes of a file; raises RingError if they are not a complete header."""
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise RingError(f"{path}: not a ring file (it does not begin with {MAGIC.decode()} and a header)")
    _, version, _, capacity, slots_offset, log_start, length, crc = HEADER.unpack_from(head)
    if version != VERSION:
        raise RingError(
            f"{path}: ring format {version}; this modtrace reads {VERSION}. Read it with the version that wrote it."
        )
    text = head[HEADER.size : HEADER.size + length]
    metadata = parse_object(text) if len(text) == length and zlib.crc32(text) == crc else None
    if (
        metadata is None
        or slots_offset != SLOTS_OFFSET
        or capacity < 1
        or log_start != SLOTS_OFFSET + capacity * SLOT_BYTES
    ):
        raise RingError(f"{path}, byte {len(MAGIC)}: the header is damaged; nothing can be recovered from this file")
    writer = metadata.pop(_WRITER, None)
    valid = {k: v for k, v in metadata.items() if k not in _METADATA_FIELDS or _is_allowed(v, _METADATA_FIELDS[k])}
    return FileHeader(capacity, log_start, valid, writer if isinstance(writer, dict) else {})


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for any other text."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def valid_records(records: Sequence[Record]) -> tuple[list[Record], dict[str, int]]:
    """Return the records that have all their fields, and the number of ids of each kind."""
    id_counts, record_counts = dict.fromkeys(_KINDS_WITH_ID, 0), dict.fromkeys(_KINDS_WITH_ID, 0)
    valid = []
    for record in records:
        kind = record.get("kind")
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None or not all(_is_allowed(record.get(field), allowed) for field, allowed in fields.items()):
            continue
        if kind in id_counts:
            # Ids are given in order, but threads may note records in another order, and an interrupt leaves a gap.
            # The bound limits the cost of a damaged id.
            record_counts[kind] += 1
            if not _is_allowed(record.get("id"), range(2 * record_counts[kind] + _MAX_ID_MARGIN)):
                continue
            id_counts[kind] = max(id_counts[kind], record["id"] + 1)
        valid.append(record)
    return valid, id_counts


def _is_allowed(value: Any, allowed: type[str] | range) -> bool:
    return type(value) is int and value in allowed if isinstance(allowed, range) else isinstance(value, allowed)
