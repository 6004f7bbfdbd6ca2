"""The name table: what the numbers in the slots stand for. Append-only, and outside the ring.

A record is one JSON object with its kind under "k":

- `{"k": "name", "id", "label", "fqn", "class"}`
- `{"k": "text", "id", "text"}`
- `{"k": "thread", "id", "name", "tid", "torch"}` (torch's own number of the thread; -1 where it is not known)
- `{"k": "anchor", "monotonic", "wall"}` nanoseconds, read together
- `{"k": "stop"}` the recording was stopped in good order
- `{"k": "metadata", …}` metadata that became known after the start
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .slot_format import NO_NAME, THREAD_BITS

__all__ = ["NameTable", "Record", "clean"]

Record = Mapping[str, Any]

_LONGEST = 1 << 14


def clean(text: str) -> str:
    """Make any Python string one that UTF-8 can hold and that stays small; lone surrogates become escapes."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


class NameTable:
    """Gives out small numbers for names, texts and threads, and notes each once.

    Args:
        sink: called with each new record, before its number is used in the ring.
        records: what is there already, as read back from a file.
    """

    def __init__(self, sink: Callable[[Record], None] | None = None, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = list(records)
        self._sink = sink
        self._names: dict[tuple[str, str, str], int] = {}
        self._texts: dict[str, int] = {}
        self._threads = 0
        self._lock = threading.RLock()

    def name(self, label: str, fqn: str, module_class: str) -> int:
        """Return the number of a module's name; the table is full at `NO_NAME`, which it then returns."""
        key = (clean(label), clean(fqn), clean(module_class))
        with self._lock:
            number = self._names.get(key)
            if number is None:
                number = len(self._names)
                if number >= NO_NAME:
                    return NO_NAME
                self._note({"k": "name", "id": number, "label": key[0], "fqn": key[1], "class": key[2]})
                self._names[key] = number
            return number

    def text(self, text: str) -> int:
        """Return the number of a text (a mark, a counter's name, the shapes of a call)."""
        text = clean(text)
        with self._lock:
            number = self._texts.get(text)
            if number is None:
                number = len(self._texts)
                if number >= NO_NAME:
                    return NO_NAME
                self._note({"k": "text", "id": number, "text": text})
                self._texts[text] = number
            return number

    def thread(self, name: str, tid: int, torch_thread: int = -1) -> int:
        """Note a thread and return its number; the last number is shared by all threads beyond it."""
        with self._lock:
            number = min(self._threads, (1 << THREAD_BITS) - 1)
            self._threads += 1
            self._note({"k": "thread", "id": number, "name": clean(name), "tid": tid, "torch": torch_thread})
            return number

    def anchor(self) -> None:
        """Note what the monotonic and the wall clock say at one moment."""
        before = time.monotonic_ns()
        wall = time.time_ns()
        self._note({"k": "anchor", "monotonic": (before + time.monotonic_ns()) // 2, "wall": wall})

    def metadata(self, metadata: Mapping[str, object]) -> None:
        """Add metadata of the recording that became known after its start."""
        self._note({"k": "metadata", **metadata})

    def stop(self) -> None:
        """Note that the recording ends in good order."""
        self.anchor()
        self._note({"k": "stop"})

    def _note(self, record: Record) -> None:
        with self._lock:
            if self._sink is not None:
                self._sink(record)
            self.records.append(record)
