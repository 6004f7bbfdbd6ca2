"""The names, texts and threads of a ring by the numbers that its events have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...ring import Record
from ..collectives import Group
from ..contents import Name, why_unknown
from ..metadata import GRAPH, fit


class NameLookup:
    """The name table by id. An id that was given out and not noted, as after an interrupt, has a stand-in.

    Args:
        records: the records of the table, as `read_ring` returns them: an id that an event uses has one.

    Attributes:
        names: of modules.
        texts: of marks, counters, shapes and collectives.
        threads: (name, tid).
        torch_threads: int64, torch's number of each thread, or -1.
        groups: the process groups, by name.
        compiled: the modules inside of what torch.compile compiled, as a text, by the id of the name.
        graphs: what torch.compile made of them, by the fully qualified name.
        unknown: why kernels inside of them have no modules, by the id of the name.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        by_kind: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            by_kind[record["kind"]].append(record)
        names = {record["id"]: Name(record["label"], record["fqn"], record["class"]) for record in by_kind["name"]}
        texts = {record["id"]: record["text"] for record in by_kind["text"]}
        threads = {record["id"]: (record["name"], record["tid"]) for record in by_kind["thread"]}
        torch_threads = {record["id"]: record["torch_thread_id"] for record in by_kind["thread"]}
        self.groups = {record["name"]: Group.of_record(record) for record in by_kind["group"]}
        self.compiled = {record["name"]: record["modules"] for record in by_kind["compiled"]}
        graphs: dict[int, dict[str, Any]] = defaultdict(dict)
        for record in by_kind["compiled"]:
            if graph := fit(record.get("graph"), GRAPH, {}):
                graphs[record["name"]][f"{graph.get('graph')} {graph.get('work')}"] = graph
        self.names = [names.get(number, Name(f"#{number}", f"#{number}", "?")) for number in _ids(names)]
        self.texts = [texts.get(number, f"#{number}") for number in _ids(texts)]
        self.threads = [threads.get(number, (f"thread #{number}", number)) for number in _ids(threads)]
        reasons = {name: why_unknown(of_name.values()) for name, of_name in graphs.items()}
        self.unknown = {name: reason for name, reason in reasons.items() if reason}
        self.graphs = {
            self.names[name].fqn: [*of_name.values()] for name, of_name in graphs.items() if name < len(self.names)
        }
        self.torch_threads = np.array([torch_threads.get(number, -1) for number in _ids(threads)], np.int64)


def _ids(entries: Mapping[int, object]) -> range:
    return range(max(entries, default=-1) + 1)
