"""Dumps of torch's flight recorder → the progress of each process in collectives.

A dump of one process is a pickle, or the same in JSON. It contains the last collectives of each group with their
sequence numbers, their completion, and the calling frames. Only plain values of a pickle are read, and no code in it
is executed.
"""

import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import orjson

from .._errors import TraceError
from .._files import open_regular
from ..ring.event_text import OPERATORS
from ..timeline import Group
from .rank_state import Blocked, GroupProgress, PeerProgress, recent_operators

_MAX_BYTES = 1 << 28
_NUMBER_LIMIT = 1 << 63
"""Limit of valid numbers; larger numbers are damage, and their texts could have any length."""
_LIBRARY_PATHS = ("/torch/", "/modtrace/track/")
"""Parts of the paths of frames that are not user code."""
_RANK = re.compile(r"(\d{1,6})(\.json|\.pickle|\.pkl)?$")
_PEERS = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_OPERATORS = {**OPERATORS, "_all_gather_base": "all_gather_into_tensor"}
"""Operator of the flight recorder -> name in `torch.distributed`, if they differ."""


class FlightRecord(NamedTuple):
    """The dump of one process; times are Unix nanoseconds, counters are the flight recorder's.

    Attributes:
        path: path of the dump.
        rank: rank of the process, from the end of the file name.
        dumped_ns: modification time of the file.
        groups: progress in each group; groups have no ranks if the dump has none.
        peers: progress with each peer; counters start at 0 with the first incomplete call.
    """

    path: str
    rank: int
    dumped_ns: int
    groups: tuple[GroupProgress, ...]
    peers: tuple[PeerProgress, ...]


def rank_of_dump(path: str) -> int | None:
    """Return the rank at the end of a dump's name; None if there is none."""
    match = _RANK.search(os.path.basename(path))
    return None if match is None else int(match[1])


def read_flight_record(path: str) -> FlightRecord:
    """Read a dump that torch wrote to `TORCH_FR_DUMP_TEMP_FILE`, or that `_dump_fr_trace` returned.

    Raises TraceError if the file cannot be read, is not a dump, or its name does not end with a rank.
    """
    rank = rank_of_dump(path)
    if rank is None:
        raise TraceError(path, "the name of a flight recorder's dump must end with its rank (nccl_trace_rank_0)")
    try:
        with io.BufferedReader(open_regular(path)) as file:
            status = os.fstat(file.fileno())
            data = file.read(min(status.st_size, _MAX_BYTES) + 1)
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise TraceError(path, f"the file is too large for a flight recorder dump (more than {_MAX_BYTES:,} bytes)")
    dump = _load(path, data)
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list):
        raise TraceError(path, "not a flight recorder's dump: it has no list of entries")
    groups = _groups(dump.get("pg_config"))
    collectives: dict[str, list[_Entry]] = {}
    messages: dict[tuple[str, str, int], list[_Entry]] = {}
    for entry in _entries(entries):
        groups.setdefault(entry.group, Group(entry.group, (), entry.description))
        if entry.peer is None:
            collectives.setdefault(entry.group, []).append(entry)
        else:
            messages.setdefault((entry.group, entry.call.operator, entry.peer), []).append(entry)
    group_progress = tuple(_group_progress(groups[name], calls) for name, calls in collectives.items())
    peers = tuple(
        _peer_progress(groups[name], operator, peer, calls) for (name, operator, peer), calls in messages.items()
    )
    return FlightRecord(path, rank, status.st_mtime_ns, group_progress, peers)


class _PlainUnpickler(pickle._Unpickler):
    """Reads numbers, texts, lists, tuples and dictionaries; everything else is an error.

    The unpickler in C allocates memory for any number of objects that a pickle claims; so does this one for bytearrays.
    """

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _load(path: str, data: bytes) -> Any:
    if data.lstrip()[:1] == b"{":
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise TraceError(path, f"not a flight recorder's dump: {error}") from error
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except EOFError as error:
        raise TraceError(path, "not a flight recorder's dump: it is empty or truncated") from error
    except Exception as error:  # a broken pickle can raise anything
        raise TraceError(path, f"not a flight recorder's dump, or a broken one: {error}") from error


class _Entry(NamedTuple):
    group: str
    description: str
    peer: int | None
    is_complete: bool
    call: Blocked


def _entries(entries: Iterable[Any]) -> Iterator[_Entry]:
    """Yield the valid entries, in order."""
    for entry in entries:
        match entry:
            case {
                "process_group": [str(group), str(description)] | (str(group), str(description)),
                "profiling_name": str(name),
                "collective_seq_id": int(counter),
                "time_created_ns": int(created_ns),
                "state": str(state),
            } if _is_number(counter) and _is_number(created_ns):
                operator = name.partition(":")[2]
                peer_match = _PEERS.match(operator)
                if peer_match is None and entry.get("is_p2p"):
                    continue  # one of several batched messages, whose peer is unknown
                operator, peer = (
                    (peer_match[1], int(peer_match[3])) if peer_match else (_OPERATORS.get(operator, operator), None)
                )
                call = Blocked(operator, counter, created_ns, details=tuple(_details(entry, state)))
                is_complete = state == "completed" or bool(entry.get("retired"))
                yield _Entry(group, "" if description == "undefined" else description, peer, is_complete, call)


def _details(entry: Mapping[str, Any], state: str) -> Iterator[str]:
    sizes, types = entry.get("input_sizes"), entry.get("input_dtypes")
    if isinstance(sizes, list) and isinstance(types, list) and len(sizes) == len(types) and sizes:
        size, kind = sizes[0], types[0]
        # Only flat lists: nested lists that share parts can expand to texts longer than any file.
        if isinstance(kind, str) and isinstance(size, list) and all(map(_is_number, size)):
            others_text = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
            yield f"{kind}{size}{others_text}"
    if state == "started":
        yield "started on the device"
    frames = entry.get("frames")
    for frame in frames if isinstance(frames, list) else ():
        match frame:
            case {"filename": str(file), "line": line, "name": str(function)} if _is_number(line) and not any(
                part in file for part in _LIBRARY_PATHS
            ):
                yield f"called at {os.path.basename(file)}:{line}, {function}"
                return


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _NUMBER_LIMIT


def _groups(config: Any) -> dict[str, Group]:
    """Return the groups of a dump that have ranks; dumps of gloo have a group without a name."""
    groups: dict[str, Group] = {}
    for entry in config.values() if isinstance(config, dict) else ():
        match entry:
            case {"name": str(name), "desc": str(description), "ranks": str(text)} if name:
                try:
                    ranks = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
                    groups[name] = Group(name, tuple(sorted(ranks)), "" if description == "undefined" else description)
    return groups


def _group_progress(group: Group, entries: list[_Entry]) -> GroupProgress:
    # The first entry of a counter has the operator.
    operators = {entry.call.counter: entry.call.operator for entry in reversed(entries)}
    pending = [entry.call for entry in entries if not entry.is_complete]
    blocked = min(pending, key=lambda call: call.counter, default=None)
    return GroupProgress(group, max(operators), recent_operators(operators), blocked)


def _peer_progress(group: Group, operator: str, peer: int, entries: list[_Entry]) -> PeerProgress:
    # The recorder keeps only the last messages, so their total number is unknown; both ends complete together.
    pending = [entry.call._replace(counter=0) for entry in entries if not entry.is_complete]
    return PeerProgress(group, operator, peer, len(pending) - 1, pending[0] if pending else None)
