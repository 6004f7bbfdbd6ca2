"""Dumps of torch's flight recorder → how far each process is with collectives.

A dump is a pickle, or its form in JSON, of one process: the last collectives of each group with their sequence
numbers, whether they are complete, and the frames that called them. Only plain values of a pickle are read; no code in
it is run.
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
_NO_NUMBER = 1 << 63
"""Larger numbers are damage; their texts could be of any length."""
_NOT_THE_USERS = ("/torch/", "/modtrace/track/")
"""Parts of the paths of frames that are not the user's."""
_RANK = re.compile(r"(\d{1,6})(\.json|\.pickle|\.pkl)?$")
_PEERS = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_OPERATORS = {**OPERATORS, "_all_gather_base": "all_gather_into_tensor"}
"""The names of operators in `torch.distributed`, where the flight recorder has others."""


class FlightRecord(NamedTuple):
    """The dump of one process; times are Unix nanoseconds, counters the flight recorder's."""

    path: str  # the file
    rank: int  # the process's, from the end of the file's name
    dumped_ns: int  # when the file was written
    # How far it is with the collectives of each group; ranks are missing where the dump has none.
    groups: tuple[GroupProgress, ...]
    # How far it is with its sends and receives, counted from 0 among those that are not complete.
    peers: tuple[PeerProgress, ...]


def rank_of_dump(path: str) -> int | None:
    """Return the rank that the name of a dump ends with; None if it does not."""
    match = _RANK.search(os.path.basename(path))
    return None if match is None else int(match[1])


def read_flight_record(path: str) -> FlightRecord:
    """Read a dump, as torch writes it to `TORCH_FR_DUMP_TEMP_FILE` or `_dump_fr_trace` returns it.

    Raises TraceError if it cannot be read, is not a dump, or its name does not end with a rank.
    """
    rank = rank_of_dump(path)
    if rank is None:
        raise TraceError(path, "the name of a flight recorder's dump ends with its rank (nccl_trace_rank_0)")
    try:
        with io.BufferedReader(open_regular(path)) as file:
            status = os.fstat(file.fileno())
            data = file.read(min(status.st_size, _MAX_BYTES) + 1)
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise TraceError(path, f"a flight recorder's dump is smaller than {_MAX_BYTES:,} bytes")
    dump = _load(path, data)
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list):
        raise TraceError(path, "not a flight recorder's dump: it has no list of entries")
    groups = _groups(dump.get("pg_config"))
    collectives: dict[str, list[_Entry]] = {}
    sent: dict[tuple[str, str, int], list[_Entry]] = {}
    for entry in _entries(entries):
        groups.setdefault(entry.group, Group(entry.group, (), entry.description))
        if entry.peer is None:
            collectives.setdefault(entry.group, []).append(entry)
        else:
            sent.setdefault((entry.group, entry.call.operator, entry.peer), []).append(entry)
    of_groups = tuple(_group_progress(groups[name], calls) for name, calls in collectives.items())
    peers = tuple(_peer_progress(groups[name], operator, peer, calls) for (name, operator, peer), calls in sent.items())
    return FlightRecord(path, rank, status.st_mtime_ns, of_groups, peers)


class _PlainUnpickler(pickle._Unpickler):
    """Reads numbers, texts, lists, tuples and dictionaries; anything else is refused.

    The one in C makes room for as many objects as a pickle says that it has, and so may this one for a bytearray.
    """

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _load(path: str, data: bytes) -> Any:
    if data.lstrip()[:1] == b"{":
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise TraceError(path, f"not a flight recorder's dump: {error}") from error
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except EOFError as error:
        raise TraceError(path, "not a flight recorder's dump: it is empty, or was cut") from error
    except Exception as error:  # a broken pickle can raise anything
        raise TraceError(path, f"not a flight recorder's dump, or a broken one: {error}") from error


class _Entry(NamedTuple):
    group: str
    description: str
    peer: int | None
    is_complete: bool
    call: Blocked


def _entries(entries: Iterable[Any]) -> Iterator[_Entry]:
    """Yield the entries that make sense, in order."""
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
                of_peer = _PEERS.match(operator)
                if of_peer is None and entry.get("is_p2p"):
                    continue  # one of several that are sent together, without saying to whom
                operator, peer = (
                    (of_peer[1], int(of_peer[3])) if of_peer else (_OPERATORS.get(operator, operator), None)
                )
                call = Blocked(operator, counter, created_ns, details=tuple(_details(entry, state)))
                is_complete = state == "completed" or bool(entry.get("retired"))
                yield _Entry(group, "" if description == "undefined" else description, peer, is_complete, call)


def _details(entry: Mapping[str, Any], state: str) -> Iterator[str]:
    sizes, types = entry.get("input_sizes"), entry.get("input_dtypes")
    if isinstance(sizes, list) and isinstance(types, list) and len(sizes) == len(types) and sizes:
        size, kind = sizes[0], types[0]
        # Only these: written out, lists in lists that share parts can be longer than any file.
        if isinstance(kind, str) and isinstance(size, list) and all(map(_is_number, size)):
            more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
            yield f"{kind}{size}{more}"
    if state == "started":
        yield "started on the device"
    frames = entry.get("frames")
    for frame in frames if isinstance(frames, list) else ():
        match frame:
            case {"filename": str(file), "line": line, "name": str(function)} if _is_number(line) and not any(
                part in file for part in _NOT_THE_USERS
            ):
                yield f"called at {os.path.basename(file)}:{line}, {function}"
                return


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _NO_NUMBER


def _groups(config: Any) -> dict[str, Group]:
    """Return the groups of a dump that have ranks; on gloo it has one without a name."""
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
    # The first entry of a counter says its operator.
    operators = {entry.call.counter: entry.call.operator for entry in reversed(entries)}
    pending = [entry.call for entry in entries if not entry.is_complete]
    blocked = min(pending, key=lambda call: call.counter, default=None)
    return GroupProgress(group, max(operators), recent_operators(operators), blocked)


def _peer_progress(group: Group, operator: str, peer: int, entries: list[_Entry]) -> PeerProgress:
    # How many came before is not known of a recorder that keeps the last ones; both ends complete together.
    pending = [entry.call._replace(counter=0) for entry in entries if not entry.is_complete]
    return PeerProgress(group, operator, peer, len(pending) - 1, pending[0] if pending else None)
