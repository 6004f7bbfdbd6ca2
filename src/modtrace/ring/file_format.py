"""The format of a ring file: a header, slots, and a log of records, which hold the name table.

```
0      magic "MODTRACE" · version u32 · 0 u32 · capacity u64 · slots offset u64 · log offset u64
       metadata length u32 · crc32 of metadata u32 · metadata (JSON)
4096   slots: capacity × 32 bytes
…      log: records of (length u32 · crc32 u32 · JSON), until a length of 0 or the end of the file
```

All numbers are little endian. Under `writer` the metadata says which process writes the file, see `owner`. The space of
header, slots and the first part of the log is reserved when the file is made. So a full disk is an error then, and no
signal while training runs.

A record is one JSON object. Its "kind" says what it is; beside that it has

| kind       | fields                                                                                                 |
|------------|--------------------------------------------------------------------------------------------------------|
| `name`     | `id`, `label`, `fqn`, `class`: of a module                                                             |
| `text`     | `id`, `text`: of a mark, a counter, the shapes of a call's inputs, or a collective's name              |
| `thread`   | `id`, `name`, `tid` (the operating system's), `torch_thread_id` (torch's number, -1 if not known)   |
| `compiled` | `name`: its id, `modules`: those inside, compiled (`blocks.0: Block, …`); the last counts; `graph`     |
| `group`    | `name`, `ranks` (the global ones, as `0-3,8`), `description`: of a process group of torch.distributed  |
| `operator` | `number`, `name`, `device`, `dtype`, `flops` (-1: not known), `bytes`: of one with certain inputs      |
| `optimizer`| `class`, `tensors`, `how`, `hooks`, `groups`: of an optimizer that stepped, see `describe_optimizer`    |
| `steps`    | `steps`: how many were looked at, `notes`: a JSON object, see `STEP_NOTES`; the last counts             |
| `clock`    | `clock`: the id of the host's monotonic clock, which times are of                                      |
| `offset`   | `clock`, `parent`: ids; `time`, `offset`, `bound`, `round_trip`: by how many ns the parent's was ahead |
| `anchor`   | `monotonic`, `wall`: nanoseconds on both clocks, read at one moment                                    |
| `stop`     | nothing: the recording was stopped in good order                                                       |

The `graph` of what was compiled has `graph` (dynamo's number), `unknown` (why nothing is known of its nodes, or empty),
`work`: for each module its name, its nodes in forward, backward and recompute, and their FLOPs, -1 where not known; and
`kernels`, of each graph that Inductor compiled of it: `key`, by which a profile names its calls, `unknown`, and
`kernels` in the order of their calls: the name, and for each module its place in `work`, the phase, and the bytes of
its nodes. A graph that is noted again, once its backward was compiled, takes the place of the former note.
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
"""The begin of the header, before the metadata."""
SLOTS_OFFSET = 4096
"""Bytes before the first slot of a file."""
LOG_CHUNK_BYTES = 1 << 20
"""The bytes that are reserved for the log at once; a file is never shorter than with the first of these."""
RECORD = struct.Struct("<II")
"""The length and the checksum before each record of the log."""
MAX_RECORD_BYTES = 1 << 20
"""A longer record is damage; what would be longer is not written."""
_WRITER = "writer"
FIRST_STEP = "first_step"
"""The key in the metadata of a ring for the number of the first step, where that is known."""
STACKS_SIGNAL = "stacks_signal"
"""The key in the metadata of a ring for the number of the signal on which its process writes its Python stacks."""
WORKERS = "workers"
"""The key in the metadata of a ring: 1 if what workers of a DataLoader record is joined when the recording is saved."""
MAX_TIME_NS = 1 << 61
"""Times from here on are damage: sums of a few must fit 64 bits."""
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
"""The fields of each kind of record, and what each may be: a text, or an integer in a range."""
_METADATA_FIELDS: Mapping[str, type[str] | range] = {
    "pid": _PIDS,
    "rank": _PIDS,
    "role": str,
    "program": str,
    FIRST_STEP: range(1 << 63),
    STACKS_SIGNAL: range(1, 65),
    WORKERS: range(2),
}
"""The fields of the metadata that are read, and what each may be; other fields are only shown."""
_KINDS_WITH_ID = ("name", "text", "thread")
_MAX_AHEAD = 64
"""How much larger an id may be than twice the number of records so far."""


class FileHeader(NamedTuple):
    """The header of a ring file."""

    capacity: int  # slots in the ring
    log_start: int  # the byte at which the log begins
    metadata: Mapping[str, Any]  # about the recording, as written there; without what it cannot say of a process
    # The process that writes it, as `owner.describe_writer` says it; empty in files of older versions.
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
    """Parse the first `SLOTS_OFFSET` bytes of a file; raises RingError if they are no whole header."""
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
    """Parse a text as a JSON object; None if it is not one."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def valid_records(records: Sequence[Record]) -> tuple[list[Record], dict[str, int]]:
    """Return the records that have all their fields, and how many ids each kind has."""
    id_counts, counted = dict.fromkeys(_KINDS_WITH_ID, 0), dict.fromkeys(_KINDS_WITH_ID, 0)
    valid = []
    for record in records:
        kind = record.get("kind")
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None or not all(_is_allowed(record.get(field), allowed) for field, allowed in fields.items()):
            continue
        if kind in id_counts:
            # Ids are given in order, but of threads that note some at once any may come first, and one is missing where
            # an interrupt came. The bound limits what a damaged one costs.
            counted[kind] += 1
            if not _is_allowed(record.get("id"), range(2 * counted[kind] + _MAX_AHEAD)):
                continue
            id_counts[kind] = max(id_counts[kind], record["id"] + 1)
        valid.append(record)
    return valid, id_counts


def _is_allowed(value: Any, allowed: type[str] | range) -> bool:
    return type(value) is int and value in allowed if isinstance(allowed, range) else isinstance(value, allowed)
