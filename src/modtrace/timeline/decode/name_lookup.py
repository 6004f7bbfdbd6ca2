"""The names, texts and threads of a ring by their numbers in its events."""

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
    """The name table by id. An id without a record, such as after an interrupt, gets a placeholder.

    Args:
        records: the records of the table, as returned by `read_ring`.

    Attributes:
        names: the names of modules.
        texts: the texts of marks, counters, shapes and collectives.
        threads: (name, tid) of each thread.
        torch_threads: int64, torch's number of each thread; -1 if unknown.
        groups: the process groups, by name.
        compiled: the modules inside a compiled module, as a text, by the id of its name.
        graphs: the graphs that torch.compile made, by the fully qualified name of the compiled module.
        unknown: the reason why kernels inside a compiled module have no modules, by the id of its name.
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
        reasons = {name: why_unknown(name_graphs.values()) for name, name_graphs in graphs.items()}
        self.unknown = {name: reason for name, reason in reasons.items() if reason}
        named_graphs = [(name, [*by_key.values()]) for name, by_key in graphs.items() if name < len(self.names)]
        self.graphs = {self.names[name].fqn: records for name, records in named_graphs}
        self.torch_threads = np.array([torch_threads.get(number, -1) for number in _ids(threads)], np.int64)


def _ids(entries: Mapping[int, object]) -> range:
    return range(max(entries, default=-1) + 1)
