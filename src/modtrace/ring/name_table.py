"""The name table: what the numbers in the slots mean. Append-only, and outside the ring.

A record is one JSON object. Its "kind" says what it is; beside that it has

| kind       | fields                                                                                                 |
|------------|--------------------------------------------------------------------------------------------------------|
| `name`     | `id`, `label`, `fqn`, `class`: of a module                                                             |
| `text`     | `id`, `text`: of a mark, a counter, the shapes of a call's inputs, or a collective's name              |
| `thread`   | `id`, `name`, `tid` (the operating system's), `torch_thread_id` (torch's number, -1 if not known)   |
| `compiled` | `name`: its id, `modules`: those inside, compiled (`blocks.0: Block, …`); the last counts              |
| `group`    | `name`, `ranks` (the global ones, as `0-3,8`), `description`: of a process group of torch.distributed  |
| `operator` | `number`, `name`, `device`, `dtype`, `flops` (-1: not known): of an operator with certain inputs        |
| `clock`    | `clock`: the id of the host's monotonic clock, which times are of                                      |
| `offset`   | `clock`, `parent`: ids; `time`, `offset`, `bound`, `round_trip`: by how many ns the parent's was ahead |
| `anchor`   | `monotonic`, `wall`: nanoseconds on both clocks, read at one moment                                    |
| `stop`     | nothing: the recording was stopped in good order                                                       |
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .slot_format import NO_NAME, THREAD_MASK

Record = Mapping[str, Any]

_MAX_TEXT_CHARS = 1 << 14


def clean(text: str) -> str:
    """Make any Python string one that UTF-8 can hold and that stays small; lone surrogates become escapes."""
    if text.isascii() and len(text) <= _MAX_TEXT_CHARS:
        return text
    if len(text) > _MAX_TEXT_CHARS:
        text = text[:_MAX_TEXT_CHARS] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


class NameTable:
    """Gives ids (small numbers, from 0 on) to names, texts and threads, and notes a record for each. Thread-safe.

    Args:
        sink: called with each new record, before its id is used in the ring. What it raises (OSError: the disk is
            full) comes out of the method that noted the record, and the record is not noted. It must be thread-safe.
        records: what is there already, as read back from a file.

    Attributes:
        records: all records so far. Threads that find something new at once may note their ids in any order.
    """

    def __init__(self, sink: Callable[[Record], None] | None = None, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = list(records)
        self._sink = sink
        self._names: dict[str, int] = {}
        self._texts: dict[str, int] = {}
        # No lock: a finalizer, which can run anywhere in here, may wait for another thread that is in here too. Each of
        # these gives out a number once.
        self._next_name = itertools.count().__next__
        self._next_text = itertools.count().__next__
        self._next_thread = itertools.count().__next__

    def name(self, label: str, fqn: str, module_class: str) -> int:
        """Return the id of a module's name, or `NO_NAME` where the table is full."""
        # One string, not a tuple, which would bring the next run of the garbage collector nearer.
        key = f"{len(label)},{len(fqn)},{label}{fqn}{module_class}"
        if clean(key) is not key:
            label, fqn, module_class = clean(label), clean(fqn), clean(module_class)
            key = f"{len(label)},{len(fqn)},{label}{fqn}{module_class}"
        name_id = self._names.get(key)
        if name_id is None:
            name_id = self._next_name()
            if name_id >= NO_NAME:
                return NO_NAME
            self._append({"kind": "name", "id": name_id, "label": label, "fqn": fqn, "class": module_class})
            # If another thread was first, its record counts, and this one is of no use.
            name_id = self._names.setdefault(key, name_id)
        return name_id

    def text(self, text: str) -> int:
        """Return the id of a text (a mark, a counter, the shapes of a call), or `NO_NAME` as `name` does."""
        text = clean(text)
        text_id = self._texts.get(text)
        if text_id is None:
            text_id = self._next_text()
            if text_id >= NO_NAME:
                return NO_NAME
            self._append({"kind": "text", "id": text_id, "text": text})
            text_id = self._texts.setdefault(text, text_id)
        return text_id

    def thread(self, name: str, tid: int, torch_thread_id: int = -1) -> int:
        """Note a thread and return its id; all threads for which there is no id left share the last one."""
        thread_id = min(self._next_thread(), THREAD_MASK)
        self._append(
            {"kind": "thread", "id": thread_id, "name": clean(name), "tid": tid, "torch_thread_id": torch_thread_id}
        )
        return thread_id

    def compiled(self, name_id: int, modules: str) -> None:
        """Note which modules torch.compile put into the calls of a name; a later note takes the place of this one."""
        self._append({"kind": "compiled", "name": name_id, "modules": clean(modules)})

    def group(self, name: str, ranks: str, description: str) -> None:
        """Note a process group, as `collective_text.rank_list` writes its ranks."""
        self._append({"kind": "group", "name": clean(name), "ranks": clean(ranks), "description": clean(description)})

    def operator(self, number: int, name: str, device: str, dtype: str, flops: int) -> None:
        """Note what an operator with certain inputs costs; -1 if that is not known.

        Args:
            number: by which the ring knows it.
            name: as torch has it (`aten::addmm`).
            device: the name of the device of its first tensor, or its type (`cpu`).
            dtype: the type of that tensor's numbers (`bfloat16`).
            flops: what it costs.
        """
        record = {"kind": "operator", "number": number, "name": clean(name), "device": clean(device)}
        self._append(record | {"dtype": dtype, "flops": flops})

    def note(self, record: Record) -> None:
        """Note a record that gives no id."""
        self._append(record)

    def anchor(self) -> None:
        """Note what the monotonic and the wall clock show at one moment."""
        before = time.monotonic_ns()
        wall = time.time_ns()
        self._append({"kind": "anchor", "monotonic": (before + time.monotonic_ns()) // 2, "wall": wall})

    def stop(self) -> None:
        """Note that the recording ends in good order."""
        self.anchor()
        self._append({"kind": "stop"})

    def _append(self, record: Record) -> None:
        if self._sink is not None:
            self._sink(record)
        self.records.append(record)
