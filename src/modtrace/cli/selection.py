"""The part of a timeline that options choose, and the errors if nothing is left."""

from typing import TYPE_CHECKING

from .._errors import ModtraceError

if TYPE_CHECKING:
    from ..timeline import Timeline


def require_spans(timeline: "Timeline", whole: "Timeline", path: str, *, chosen: bool) -> None:
    """Check that there is something to show or to write.

    Args:
        timeline: what is left.
        whole: what was read.
        path: from where.
        chosen: whether options chose from it; a recording without spans is not an error otherwise.

    Raises:
        ModtraceError: nothing is left, or the file names no module; the message says what there is.
    """
    if len(timeline.columns):
        return
    if len(whole.columns):
        columns, example = whole.columns, whole.names[whole.columns.name[0]].fqn
        first, last = int(columns.step.min()), int(columns.step.max())
        length = (int(columns.end.max()) - int(columns.start[0])) / 1e6
        there = f"{len(columns)} spans in steps {first} to {last}, over {length:.3f} ms, of modules such as {example}"
        raise ModtraceError(f"nothing is left of {path}: it holds {there}")
    notes = whole.metadata.get("notes")
    if isinstance(notes, list) and notes:
        raise ModtraceError(f"{path} holds no module: {notes[0]}")
    if chosen:
        raise ModtraceError(f"nothing is left of {path}: it holds no spans")


def no_such_module(path: str, pattern: str, example: str) -> ModtraceError:
    """Return the error of a pattern that matches no module.

    Args:
        path: the file, or files.
        pattern: as it was given.
        example: the fully qualified name of a module that is there.
    """
    hint = f"; there is {example}, for one" if example else ""
    return ModtraceError(f"nothing is left of {path}: no module is called {pattern}{hint}")
