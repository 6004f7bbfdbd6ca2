"""Trees of calls as text.

    forward:
      Net
        Net.a
        Net.a #1
    backward:
      Net
        Net.a #1
        Net.a
          recompute Net.a

A section is a track: `forward:` and `backward:` of the step's thread, `forward @worker:` of the thread `worker`.
A line is a span, below the span around it, in order of time: its fully qualified name; ` #n` if it is the n-th
call of that name (from 0, which is not written); `recompute` before a recomputation; `~` after a span that is not
complete. In expected text ` ?` after a line means that the span may be missing: without it, the lines inside it
move up. ` ~?` means that the span may or may not be complete.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

__all__ = ["Node", "Trees", "parse", "project", "rename", "render", "variants"]


@dataclass(frozen=True)
class Node:
    """A span and the spans inside it."""

    fqn: str
    call: int = 0
    recompute: bool = False
    cut: bool = False
    optional: bool = False
    cut_optional: bool = False
    children: tuple[Node, ...] = ()


Trees = dict[str, tuple[Node, ...]]
"""The outermost spans of each track, by the title of its section."""

_LINE = re.compile(
    r"(?P<indent> *)(?P<recompute>recompute )?(?P<fqn>\S+?)(?: #(?P<call>\d+))?"
    r"(?P<cut> ~(?!\?))?(?P<open> ~\?)?(?P<optional> \?)?"
)


@dataclass
class _Open:
    node: Node
    depth: int
    children: list[Node] = field(default_factory=list)

    def closed(self) -> Node:
        return replace(self.node, children=tuple(self.children))


def parse(text: str) -> Trees:
    """Read expected text."""
    trees: Trees = {}
    stack = [_Open(Node(""), -1)]
    title = ""

    def close(depth: int) -> None:
        while stack[-1].depth >= depth:
            done = stack.pop()
            stack[-1].children.append(done.closed())

    lines = [line for line in text.splitlines() if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    for line in lines:
        line = line[margin:].rstrip()
        if line.endswith(":"):
            close(0)
            if title:
                trees[title] = tuple(stack[0].children)
            title = line[:-1]
            stack = [_Open(Node(""), -1)]
            continue
        match = _LINE.fullmatch(line)
        assert match is not None, f"no line of a tree: {line!r}"
        depth = len(match["indent"]) // 2 - 1
        close(depth)
        node = Node(
            match["fqn"],
            int(match["call"] or 0),
            match["recompute"] is not None,
            match["cut"] is not None,
            match["optional"] is not None,
            match["open"] is not None,
        )
        stack.append(_Open(node, depth))
    close(0)
    if title:
        trees[title] = tuple(stack[0].children)
    return trees


def render(trees: Trees) -> str:
    """Write trees as text."""
    lines: list[str] = []

    def write(node: Node, depth: int) -> None:
        recompute, number = "recompute " * node.recompute, f" #{node.call}" * bool(node.call)
        marks = " ~" * node.cut + " ~?" * node.cut_optional + " ?" * node.optional
        lines.append(f"{'  ' * (depth + 1)}{recompute}{node.fqn}{number}{marks}")
        for child in node.children:
            write(child, depth + 1)

    for title, nodes in trees.items():
        lines.append(f"{title}:")
        for node in nodes:
            write(node, 0)
    return "\n".join(lines)


def variants(trees: Trees) -> list[Trees]:
    """Return all trees that the marks ` ?` and ` ~?` allow, without these marks."""
    titles = list(trees)
    choices = itertools.product(*(_variants(trees[title]) for title in titles))
    return [{title: nodes for title, nodes in zip(titles, choice, strict=True) if nodes} for choice in choices]


def _variants(nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    options: list[list[tuple[Node, ...]]] = []
    for node in nodes:
        inner = _variants(node.children)
        plain = replace(node, optional=False, cut_optional=False)
        here: list[tuple[Node, ...]] = [(replace(plain, children=children),) for children in inner]
        if node.cut_optional:
            here += [(replace(plain, children=children, cut=True),) for children in inner]
        if node.optional:
            here += inner
        options.append(here)
    return [tuple(itertools.chain.from_iterable(choice)) for choice in itertools.product(*options)]


def rename(trees: Trees, before: str, after: str) -> Trees:
    """Return trees in which the names that begin with the module `before` begin with `after` instead."""

    def renamed(nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(
            replace(
                node,
                fqn=f"{after}{node.fqn[len(before) :]}" if f"{node.fqn}.".startswith(f"{before}.") else node.fqn,
                children=renamed(node.children),
            )
            for node in nodes
        )

    return {title: renamed(nodes) for title, nodes in trees.items()}


def project(trees: Trees) -> Trees:
    """Return the trees as sets of open names show them: without call numbers, recomputations and repeated names."""
    projected = {title: _project(nodes, frozenset()) for title, nodes in trees.items()}
    return {title: nodes for title, nodes in projected.items() if nodes}


def _project(nodes: Sequence[Node], outer_names: frozenset[str]) -> tuple[Node, ...]:
    flat: list[Node] = []
    for node in _spliced(nodes, outer_names):
        if flat and flat[-1].fqn == node.fqn:
            flat[-1] = replace(flat[-1], children=flat[-1].children + node.children)
        else:
            flat.append(node)
    return tuple(Node(node.fqn, children=_project(node.children, outer_names | {node.fqn})) for node in flat)


def _spliced(nodes: Sequence[Node], outer_names: frozenset[str]) -> list[Node]:
    spliced: list[Node] = []
    for node in nodes:
        spliced.extend(_spliced(node.children, outer_names) if node.fqn in outer_names else [node])
    return spliced
