"""Where recordings and datasets are: in folders, or behind URLs such as `s3://bucket/run`, which pyarrow opens."""

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .._errors import ModtraceError, require_extra
from .._files import work_folder

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

DATASET_MARKER = "dataset.json"

Place = str | os.PathLike[str]
"""A folder, or a URL."""


def is_url(place: Place) -> bool:
    """Say whether this is a URL, and not the path of a folder."""
    return "://" in os.fspath(place)


def absolute(place: Place) -> str:
    """Return what another process, whose working folder may be another one, knows a place by."""
    return os.fspath(place) if is_url(place) else os.path.abspath(place)


def open_place(place: Place) -> "tuple[FileSystem, str]":
    """Return the file system of a place, and its path there; raises ModtraceError if pyarrow opens none."""
    require_extra("ranks", "pyarrow")
    from pyarrow.fs import FileSystem

    try:
        filesystem, path = FileSystem.from_uri(absolute(place))
    except (ValueError, OSError, ImportError) as error:
        raise ModtraceError(f"{os.fspath(place)}: pyarrow cannot open it: {error}") from error
    return filesystem, path.rstrip("/")


def is_dataset(place: Place) -> bool:
    """Say whether a place looks like a packed dataset; raises ModtraceError if it is a URL that cannot be opened."""
    if not is_url(place):
        return os.path.isfile(os.path.join(place, DATASET_MARKER))
    filesystem, path = open_place(place)
    try:
        return bool(filesystem.get_file_info(f"{path}/{DATASET_MARKER}").is_file)
    except OSError as error:
        raise ModtraceError(f"{os.fspath(place)}: cannot be read: {error}") from error


@contextmanager
def as_folder(place: Place, executor: Executor | None = None) -> Iterator[str]:
    """Yield a place itself if it is a folder; of a URL a copy of its files, which goes with the block.

    Raises ModtraceError if it cannot be copied, or an executor would not see the copy.
    """
    if not is_url(place):
        yield os.fspath(place)
        return
    if executor is not None:
        raise ModtraceError(f"{place}: recordings are copied from there to this host, where no executor sees them")
    filesystem, path = open_place(place)
    from pyarrow.fs import FileSelector

    with work_folder() as folder:
        try:
            for file in filesystem.get_file_info(FileSelector(path)):
                if file.is_file:
                    copy = folder / file.base_name
                    with filesystem.open_input_stream(file.path) as source, open(copy, "wb") as target:
                        while block := source.read(_BLOCK_BYTES):
                            target.write(block)
                    changed = file.mtime_ns or 0
                    os.utime(copy, ns=(changed, changed))
        except OSError as error:
            raise ModtraceError(f"{os.fspath(place)}: cannot be read: {error}") from error
        yield os.fspath(folder)


_BLOCK_BYTES = 8 << 20
