"""The name table of a ring, by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ..._typing import Int32Array
from ...ring import Events, Kind, Record
from ...ring.slot_format import CALL_ENTER_KINDS, CALL_EXIT_KINDS, COMMUNICATION_KINDS, NO_NAME
from ..contents import Name

__all__ = ["NameLookup"]

Entry = TypeVar("Entry")


class NameLookup:
    """The name table by number; numbers that the events use and the table lacks (a cut file) get a stand-in.

    Attributes:
        names: of modules.
        texts: of marks, counters and shapes.
        threads: (name, tid).
        torch_threads: int64, torch's number of each thread, or -1.
    """

    def __init__(self, records: Sequence[Record], events: Events) -> None:
        names: dict[int, Name] = {}
        texts: dict[int, str] = {}
        threads: dict[int, tuple[str, int]] = {}
        torch_threads: dict[int, int] = {}
        for record in records:
            kind = record["kind"]
            if kind == "name":
                names[record["id"]] = Name(record["label"], record["fqn"], record["class"])
            elif kind == "text":
                texts[record["id"]] = record["text"]
            elif kind == "thread":
                threads[record["id"]] = (record["name"], record["tid"])
                torch_threads[record["id"]] = record["torch_thread_id"]
        name_used = events.name[np.isin(events.kind, (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS))]
        text_used = events.name[np.isin(events.kind, (Kind.MARK, Kind.COUNTER, Kind.SHAPES, *COMMUNICATION_KINDS))]
        text_used = text_used[text_used != NO_NAME]
        self.names = _as_list(names, name_used, lambda number: Name(f"#{number}", f"#{number}", "?"))
        self.texts = _as_list(texts, text_used, lambda number: f"#{number}")
        self.threads = _as_list(threads, events.thread, lambda number: (f"thread #{number}", number))
        self.torch_threads = np.array(_as_list(torch_threads, events.thread, lambda _: -1), np.int64)


def _as_list(known: Mapping[int, Entry], used: Int32Array, stand_in: Callable[[int], Entry]) -> list[Entry]:
    """Return the entries by number, long enough for every number that is used."""
    # A damaged slot can hold any number; what is used decides how many there are, not how large the numbers get.
    count = max(known, default=-1) + 1
    beyond = used[used >= count]
    count = max(count, int(beyond.max()) + 1 if len(beyond) else 0)
    return [known[number] if number in known else stand_in(number) for number in range(count)]
