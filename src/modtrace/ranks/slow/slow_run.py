"""`SlowRun`, the result of `ranks slow`: the late ranks of each step and of the run, in words, tables and a picture."""

import base64
import html
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..._arrays import Float32Array, Int64Array, UInt8Array
from ..._errors import WriteError
from ..._files import atomic_writer
from ..._tables import (
    LONG_MS,
    MICROSECONDS,
    MODULE,
    NAME,
    PERCENT,
    TEXT,
    Column,
    Form,
    Table,
    Unit,
    counted,
    fields_of,
    join_texts,
    json_text,
    json_values,
    ms_text,
    to_csv,
)
from ...live.places import processes_phrase
from ...ring.event_text import rank_list
from ...timeline.contents import process_label
from ..all_ranks import damage_sentences, peak_sentence
from .late_steps import NO_RANK, OUTSIDE_FQN, ModulePhase, StepFinding, often_late, place_text
from .role_waits import RoleWait

_NAMED_RANKS = 3
"""Maximum number of ranks with a sentence each."""
_COSTLY_NS = 20_000_000
"""Minimum mean cost of a delay for a rank to be named as late now and then: the OS may stop any thread for less."""
_COSTLY_SHARE = 0.01
"""Minimum cost of all these delays together, as a share of the run's time."""
_MAX_CELLS = (1500, 2000)
"""Maximum (rows, columns) of the picture; if there are more ranks or steps, neighbours share a cell."""
_TABLE_ROWS = 100
"""Maximum number of rows of a table of the page."""
_MIN_COLOUR_NS = 1e3
"""Lateness at the low end of the colour scale."""
_MIN_PLACE_SHARE = 0.25
"""Minimum share of a slow rank's cost in its steps' worst places for the rank to be slow there.

A rank that has more to do everywhere has a few hundredths in each place, about as much as by chance.
"""
_COLUMN_NOTES = (
    "cost: own time of the late rank above the median of the others, without its waits.",
    "saved: time by which the run would be shorter without this cost.",
    "late by: maximum delay of the late rank at a collective, after the median of the others.",
    "±: maximum error of this delay.",
)
_UNKNOWN = (224, 224, 224)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; color: #1a1a1a;
  background: #fff }
img { width: 100%; min-height: 12rem; max-height: 80vh; image-rendering: pixelated; border: 1px solid #bbb }
figure { margin: 1rem 0 } figcaption { color: #555 }
table { border-collapse: collapse; margin: 0 0 1.5rem } td, th { padding: .1rem .7rem; border-bottom: 1px solid #ddd }
.scale { display: inline-block; width: 10rem; height: .8rem; vertical-align: middle;
  background: linear-gradient(to right, #fff, #fdd49e, #ef6548, #7f0000); border: 1px solid #bbb }
"""
_COLOURS = np.array([(255, 255, 255), (253, 212, 158), (239, 101, 72), (127, 0, 0)], np.float64)


class PartOfRun(NamedTuple):
    """The findings of a part of a run.

    Attributes:
        steps: one finding per step.
        ranks: the ranks in this part, ascending.
        lateness: float32[ranks, steps], maximum ns after the other ranks' median; NaN without collectives.
        saved: late rank -> ns by which these steps would be shorter without its excess.
        saved_ns: ns by which these steps would be shorter without the excess of all late ranks.
        waits: True if a thread waited for other ranks; always False if a device runs all collectives.
    """

    steps: list[StepFinding]
    ranks: Int64Array
    lateness: Float32Array
    saved: Mapping[int, int]
    saved_ns: int
    waits: bool


class LateModule(NamedTuple):
    """A module, or another place, in which a rank was late."""

    fqn: str  # name of the module or range, see `ModuleExcess`
    phase: str  # its phase, see `ModuleExcess`
    steps: int  # number of steps in which the rank was late there
    cost_ns: int  # total cost in these steps


class LateRank(NamedTuple):
    """A late rank, over the whole run.

    Attributes:
        rank: number of the rank.
        steps: number of steps in which it was the late rank.
        cost_ns: total cost in these steps.
        saved_ns: ns by which the run would be shorter without its excess.
        is_slow: True if it was late more often than by chance, False if now and then.
        modules: the places in which it was late, the worst first.
    """

    rank: int
    steps: int
    cost_ns: int
    saved_ns: int
    is_slow: bool
    modules: tuple[LateModule, ...]

    @property
    def place(self) -> str:
        """The name of the worst place, as used in sentences; empty if unknown."""
        return place_text(*self.modules[0][:2]) if self.modules else ""


@dataclass(frozen=True)
class SlowRun:
    """The late ranks of a run, their steps and their cost; made by `find_slow_ranks`.

    Attributes:
        steps: the finding of each step, in order.
        ranks: number of ranks.
        late: the late ranks, the most costly first.
        duration_ns: total duration of all steps whose duration is known.
        parts: the findings of each part of the run; the picture shows their lateness.
        peak_bytes: rank -> maximum bytes of its tensors; only ranks that recorded memory.
        lines: rank -> program lines around its longest time outside modules and ranges; only if known.
        damage: rank -> description of the damage of its ring; only damaged rings.
        unseen: description of the waits that are not recorded, with a remedy; empty if all waits are recorded.
        waits: the waits of roles for other roles, the longest first.
        roles: role -> its result, if roles have ranks of their own; then `steps`, `late` and `parts` are empty.
        role_of: rank -> its role; only ranks with a role.
    """

    steps: Sequence[StepFinding]
    ranks: int
    late: Sequence[LateRank]
    duration_ns: int
    parts: Sequence[PartOfRun]
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    lines: Mapping[int, str] = field(default_factory=dict)
    damage: Mapping[int, str] = field(default_factory=dict)
    unseen: str = ""
    waits: Sequence[RoleWait] = ()
    roles: Mapping[str, "SlowRun"] = field(default_factory=dict)
    role_of: Mapping[int, str] = field(default_factory=dict)

    @property
    def saved_ns(self) -> int:
        """Time by which the run would be shorter if no rank had been late, ns."""
        return sum(part.saved_ns for part in self.parts)

    @property
    def sentences(self) -> list[str]:
        """The findings of the run, one sentence per line."""
        return self._sentences(bool(self.waits))

    def name(self, rank: int) -> str:
        """Return the name of a process in sentences and tables (`rollout 2`, `rank 2`)."""
        return process_label(self.role_of.get(rank, ""), rank)

    def _sentences(self, roles_wait: bool) -> list[str]:
        """Return the sentences; `roles_wait`: earlier lines report waits between roles."""
        waits = [wait.sentence for wait in self.waits]
        if self.roles:
            by_role = {role: run._sentences(roles_wait) for role, run in self.roles.items() if run.steps}
            lines = [f"{role}: {line}" for role, role_lines in by_role.items() for line in role_lines]
            return [f"{self.ranks:,} processes of {len(self.roles)} roles", *waits, *lines]
        lines = waits
        if self.steps:
            bound = max(step.bound_ns for step in self.steps)
            clocks = (
                f"clock error between two ranks: at most {bound / 1e3:,.1f} µs"
                if bound
                else "ranks that wait for each other read one clock"
            )
            count = f"{counted(self.ranks, 'rank')}, {counted(len(self.steps), 'step')}; {clocks}"
            lines = [count, *waits, *self._late_sentences(roles_wait)]
        peak = peak_sentence({self.name(rank): peak_bytes for rank, peak_bytes in self.peak_bytes.items()})
        damage = damage_sentences({self.name(rank): text for rank, text in self.damage.items()})
        return [*lines, *([peak] if peak else []), *damage]

    def _late_sentences(self, roles_wait: bool) -> list[str]:
        """Return the sentences on slow ranks, and on ranks that were late now and then."""
        slow = [rank for rank in self.late if rank.is_slow]
        # A rank that was late now and then is named only if its delays are costly.
        costly = [rank for rank in self.late if not rank.is_slow and self._is_costly(rank)][:_NAMED_RANKS]
        lines = [self._rank_sentence(rank) for rank in slow[:_NAMED_RANKS]]
        if len(slow) > _NAMED_RANKS:
            unnamed = processes_phrase((self.role_of.get(late.rank, ""), late.rank) for late in slow[_NAMED_RANKS:])
            lines.append(f"so were {unnamed}")
        if slow and self.unseen:
            lines.append(f"cannot tell whether other ranks are slower too: {self.unseen}")
        elif self.unseen:
            lines.append(f"cannot tell whether a rank is slower: {self.unseen}")
        elif not slow:
            prefix = "apart from waits between roles, " if roles_wait else ""
            lines.append(f"{prefix}no rank is slower than the others again and again")
        lines += [self._rank_sentence(rank) for rank in costly]
        verdicts = Counter(step.verdict for step in self.steps)
        if unnamed_steps := verdicts["late"] - sum(rank.steps for rank in [*slow, *costly]):
            lines.append(f"in {counted(unnamed_steps, 'step')} one rank or another was late now and then")
        if unclear_steps := verdicts["cannot tell"]:
            steps = counted(unclear_steps, "step")
            lines.append(f"in {steps} the late rank is not clear: the delay is smaller than the clock error")
        return lines

    def _is_costly(self, late: LateRank) -> bool:
        """Return whether a place of a rank has long delays on average, and a large cost in total."""
        min_ns = _COSTLY_SHARE * self.duration_ns
        return any(place.cost_ns >= max(place.steps * _COSTLY_NS, min_ns) for place in late.modules)

    def _rank_sentence(self, late: LateRank) -> str:
        mean = ms_text(late.cost_ns / max(late.steps, 1))
        place = f", mostly in {late.place}" if late.modules else ""
        if late.modules and late.modules[0].fqn == OUTSIDE_FQN and late.rank in self.lines:
            place += f", longest {self.lines[late.rank]}"
        share_of_worst = sum(place.cost_ns for place in late.modules) / max(late.cost_ns, 1)
        if late.is_slow and place and share_of_worst < _MIN_PLACE_SHARE:
            place = f", in all places alike ({share_of_worst:.0%} in the worst one): more to do, or a slower machine"
        # The duration of the first step is unknown, and so is the time after the last one.
        late_steps = (step for step in self.steps if step.verdict == "late" and step.rank == late.rank)
        saved_ns = sum(step.saved_ns for step in late_steps if step.duration_ns)
        percent = f"{100 * saved_ns / self.duration_ns if self.duration_ns else 0:.1f}"
        share = f" ({percent} %)" if float(percent) > 0 else ""
        return (
            f"{self.name(late.rank)} was late in {late.steps:,} of {counted(len(self.steps), 'step')}, by {mean} "
            f"on average{place}; without this delay the run would be {ms_text(late.saved_ns)} shorter{share}"
        )

    @property
    def lateness(self) -> tuple[Float32Array, list[int], list[int]]:
        """The maximum ns of each rank after the others' median: float32[ranks, steps], NaN if unknown; ranks; steps."""
        ranks = np.unique(np.concatenate([part.ranks for part in self.parts])) if self.parts else np.empty(0, np.int64)
        steps = [step.step for part in self.parts for step in part.steps]
        matrix = np.full((len(ranks), len(steps)), np.nan, np.float32)
        column = 0
        for part in self.parts:
            width = part.lateness.shape[1]
            matrix[np.searchsorted(ranks, part.ranks), column : column + width] = part.lateness
            column += width
        return matrix, ranks.tolist(), steps

    @property
    def tables(self) -> dict[str, Table]:
        """The tables "ranks", "modules", "steps" and, if roles wait, "waits"; the most costly rows come first."""
        in_order = sorted(self.steps, key=lambda step: (step.verdict != "late", -step.cost_ns, step.step))
        waits = {"waits": Table(_WAIT_COLUMNS, self.waits, fields_of(RoleWait))} if self.waits else {}
        return waits | {
            "ranks": Table([self._rank_column(lambda late: late.rank), *_RANK_COLUMNS], self.late, fields_of(LateRank)),
            "modules": Table(_MODULE_COLUMNS, self._late_modules()),
            "steps": Table(self._step_columns(), in_order),
        }

    def to_text(self, limit: int | None = None) -> str:
        """Return the sentences, and the tables with at most `limit` rows each; times are in ms."""
        return self._rendered("text", limit)

    def to_markdown(self, limit: int | None = None) -> str:
        """Return the sentences and tables as GitHub Markdown."""
        return self._rendered("md", limit)

    def to_csv(self) -> str:
        """Return the table of steps as CSV with a header line."""
        steps = self.tables["steps"]
        rows = [[column.text(column.value_in(step)) for column in steps.columns] for step in steps.rows]
        return to_csv([column.heading for column in steps.columns], rows)

    def save(self, path: str | os.PathLike[str], title: str = "ranks") -> None:
        """Write a page without script or network: ranks × steps, coloured by lateness, and the tables.

        Args:
            path: a `.html` file, replaced atomically.
            title: title of the page.

        Raises:
            WriteError: the path has another suffix, or cannot be written; an existing file stays as it was.
        """
        if not os.fspath(path).lower().endswith(".html"):
            raise WriteError(f"{os.fspath(path)}: the report is an HTML page; give it a name that ends in .html")
        with atomic_writer(path) as file:
            file.write(_page(self, title).encode())

    def _rank_column(self, rank_of: Callable[[Any], int | None]) -> Column:
        """Return the column of ranks: their numbers, or their names if they have roles."""
        if not self.role_of:
            return Column("rank", rank_of)
        return Column("rank", lambda row: None if (rank := rank_of(row)) is None else self.name(rank), NAME)

    def _step_columns(self) -> list[Column]:
        return [*_STEP_COLUMNS[:2], self._rank_column(_unless_even("rank")), *_STEP_COLUMNS[2:]]

    def _processes(self, ranks: Iterable[int]) -> str:
        """Return the text of a cell with several ranks (`0-2,5`, `trainer 0-2, rollout 5`)."""
        return (
            processes_phrase((self.role_of.get(rank, ""), rank) for rank in ranks) if self.role_of else rank_list(ranks)
        )

    def _rendered(self, form: Form, limit: int | None) -> str:
        tables = [table.to(form, limit).rstrip("\n") for table in self.tables.values() if table.rows]
        return join_texts(self.sentences, [*tables, "\n".join(_COLUMN_NOTES)])

    def _late_modules(self) -> list[tuple[LateModule, str]]:
        """Return the modules in which ranks were late, the most costly first, each with the text of these ranks."""
        steps, cost_ns, ranks = Counter[ModulePhase](), Counter[ModulePhase](), dict[ModulePhase, list[int]]()
        for late in self.late:
            for module in late.modules:
                place = module[:2]
                steps[place] += module.steps
                cost_ns[place] += module.cost_ns
                ranks.setdefault(place, []).append(late.rank)
        return [
            (LateModule(*place, steps[place], ns), self._processes(ranks[place])) for place, ns in cost_ns.most_common()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values; times are ns."""
        return {
            "sentences": self.sentences,
            "ranks": self.ranks,
            "duration_ns": self.duration_ns,
            "saved_ns": self.saved_ns,
            "unseen": self.unseen,
            "late_ranks": json_values(self.late),
            "waits": json_values(self.waits),
            "roles": {
                role: run.to_dict() | {"sentences": run._sentences(bool(self.waits))}
                for role, run in self.roles.items()
            },
            "processes": [{"rank": rank, "role": role} for rank, role in self.role_of.items()],
            "damage": [{"rank": rank, "damage": text} for rank, text in self.damage.items()],
            "peak_bytes": [{"rank": rank, "peak_bytes": peak} for rank, peak in self.peak_bytes.items()],
            "steps": json_values(self.steps),
        }

    def to_json(self) -> str:
        """Return the values of `to_dict` as JSON text."""
        return json_text(self.to_dict())


def _step_place(step: StepFinding) -> ModulePhase:
    """Return the module and the phase of a step's largest excess."""
    fqn, phase = step.modules[0][:2] if step.modules else ("", "")
    return fqn or (place_text(OUTSIDE_FQN, "") if step.modules else ""), phase


def _unless_even(field: str) -> Callable[[StepFinding], Any]:
    return lambda step: None if step.verdict == "even" else getattr(step, field)


_RANK_COLUMNS = (
    Column("late in steps", "steps"),
    Column("cost ms", "cost_ns", LONG_MS),
    Column("saved ms", "saved_ns", LONG_MS),
    Column("verdict", lambda late: "slow" if late.is_slow else "now and then", TEXT),
    Column("mostly in", "place", NAME),
)
_MODULE_COLUMNS = (
    Column("module", lambda row: row[0].fqn or place_text(OUTSIDE_FQN, ""), MODULE),
    Column("phase", lambda row: row[0].phase, TEXT),
    Column("late in steps", lambda row: row[0].steps),
    Column("cost ms", lambda row: row[0].cost_ns, LONG_MS),
    Column("ranks", lambda row: row[1], TEXT),
)
_WAIT_COLUMNS = (
    Column("role", "role", TEXT),
    Column("waits for", "waits_for", TEXT),
    Column("% of a step", "share", PERCENT),
    Column("ms/step", "ns_per_step", LONG_MS),
    Column("where", lambda wait: place_text(wait.fqn, wait.phase), NAME),
    Column("times as long", "ratio", Unit("number", "{:,.1f}".format)),
)
_STEP_COLUMNS = (
    Column("step", "step"),
    Column("verdict", "verdict", TEXT),
    Column("module", lambda step: _step_place(step)[0], MODULE),
    Column("phase", lambda step: _step_place(step)[1], TEXT),
    Column("cost ms", _unless_even("cost_ns"), LONG_MS),
    Column("late by ms", _unless_even("lateness_ns"), LONG_MS),
    Column("± µs", "bound_ns", MICROSECONDS),
    Column("step ms", lambda step: step.duration_ns or None, LONG_MS),
)


def join_parts(parts: Iterable[PartOfRun]) -> SlowRun:
    """Return the findings of all parts of a run as one result."""
    in_order = sorted((part for part in parts if part.steps), key=lambda part: part.steps[0].step)
    steps = [step for part in in_order for step in part.steps]
    ranks = len(np.unique(np.concatenate([part.ranks for part in in_order]))) if in_order else 0
    steps_of: dict[int, list[StepFinding]] = {}
    for step in steps:
        if step.verdict == "late":
            steps_of.setdefault(step.rank, []).append(step)
    # Only ranks that call collectives can be late; ranks of another role may call none.
    compared_ranks = int(
        np.median(np.concatenate([np.isfinite(part.lateness).sum(axis=0) for part in in_order] or [[0]]))
    )
    late_rank_of_step = [step.rank if step.verdict == "late" else NO_RANK for step in steps]
    slow_ranks = often_late(late_rank_of_step, compared_ranks if compared_ranks > 1 else ranks)
    late = []
    for rank, late_steps in steps_of.items():
        place_steps, cost_ns = Counter[ModulePhase](), Counter[ModulePhase]()
        for step in late_steps:
            for worst in step.modules[:1]:
                place_steps[worst[:2]] += 1
                cost_ns[worst[:2]] += min(worst.excess_ns, step.cost_ns)
        places = tuple(LateModule(*place, place_steps[place], ns) for place, ns in cost_ns.most_common())
        total, saved = sum(step.cost_ns for step in late_steps), sum(part.saved.get(rank, 0) for part in in_order)
        late.append(LateRank(rank, len(late_steps), total, saved, rank in slow_ranks, places))
    late.sort(key=lambda rank: (-rank.cost_ns, rank.rank))
    return SlowRun(steps, ranks, late, sum(step.duration_ns for step in steps), in_order)


def png(pixels: UInt8Array) -> bytes:
    """Return uint8[height, width, 3] as the bytes of a PNG file."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _page(run: SlowRun, title: str) -> str:
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src '
        "'unsafe-inline'\">",
        f"<title>{html.escape(title)}: who is late</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}: who is late</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in run.sentences),
        *_picture(run),
    ]
    for name, table in run.tables.items():
        lines += [f"<h2>{name.capitalize()}</h2>", table.to("html", _TABLE_ROWS) if table.rows else "<p>none</p>"]
    return "\n".join([*lines, *(f"<p>{line}</p>" for line in _COLUMN_NOTES), "</body></html>\n"])


def _picture(run: SlowRun) -> list[str]:
    matrix, ranks, steps = run.lateness
    if not matrix.size:
        return ["<p>There is no collective that several ranks called.</p>"]
    cells: Any = matrix
    for axis, limit in enumerate(_MAX_CELLS):
        size = cells.shape[axis]
        if size > limit:  # neighbours share a cell, which has the maximum
            cells = np.fmax.reduceat(cells, np.unique(np.arange(limit) * size // limit), axis=axis)
    max_ns = max(float(np.nanmax(cells, initial=0.0)), 2 * _MIN_COLOUR_NS)
    data = base64.b64encode(png(_coloured(cells, max_ns))).decode()
    caption = (
        f"Each row is a rank ({run.name(ranks[0])} at the top, {run.name(ranks[-1])} at the bottom), each column a "
        f"step ({steps[0]} to {steps[-1]}). Colour (logarithmic): delay of a rank after the median of the others, from "
        f'{_MIN_COLOUR_NS / 1e3:g} µs <span class="scale"></span> to {max_ns / 1e6:,.3f} ms; grey: unknown.'
    )
    alt = "ranks by steps, coloured by lateness"
    image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
    return [f"<figure>{image}<figcaption>{caption}</figcaption></figure>"]


def _coloured(matrix: Any, max_ns: float) -> UInt8Array:
    is_known = np.isfinite(matrix)
    ratio = np.clip(np.where(is_known, matrix, 0), _MIN_COLOUR_NS, max_ns) / _MIN_COLOUR_NS
    level = np.log(ratio) / np.log(max_ns / _MIN_COLOUR_NS)
    stops = np.linspace(0, 1, len(_COLOURS))
    pixels = np.stack([np.interp(level, stops, colour) for colour in _COLOURS.T], axis=-1)
    pixels[~is_known] = _UNKNOWN
    coloured: UInt8Array = np.rint(pixels).astype(np.uint8)
    return coloured
