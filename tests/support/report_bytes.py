"""Every byte of a report, and which words are among them."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Iterator

from modtrace import Timeline
from modtrace.reporting.clean_timeline import REPORT_START_NS
from modtrace.timeline import Span

FILES = ["summary.md", "environment.txt", "trace.pftrace.gz", "viewer.html"]


def files_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        assert packed.testzip() is None
        return {name: packed.read(name) for name in packed.namelist()}


def all_bytes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Every byte of an archive by place: as it is, unpacked, and what is packed inside."""
    yield "archive", data
    for name, content in files_of(data).items():
        yield name, content
        if name.endswith(".gz"):
            yield f"{name} unpacked", gzip.decompress(content)
        if name.endswith(".html"):
            packed = re.search(rb'id="modtrace-data">([A-Za-z0-9+/=]+)</script>', content)
            assert packed is not None
            yield f"{name} text", re.sub(rb'">[A-Za-z0-9+/=]+</script>', b"", content)
            yield f"{name} data", gzip.decompress(base64.b64decode(packed[1]))
            table = re.search(rb'id="modtrace-table">([A-Za-z0-9+/=]+)</script>', content)
            assert table is not None
            yield from ((f"{name} table", text) for text in packed_in(base64.b64decode(table[1])))
        if name.endswith("trace.gz"):
            yield from ((f"{name} table", text) for text in packed_in(gzip.decompress(content)))


def packed_in(data: bytes) -> Iterator[bytes]:
    """Yield the contents of all zlib streams anywhere in some bytes."""
    for match in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj().decompress(data[match.start() :])


def words_in(data: bytes, words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the words that are in an archive, in any case or as hexadecimal digits, and their places."""
    return [
        (word, place)
        for place, content in all_bytes(data)
        for word in words
        # A few letters are in packed bytes by chance; unpacked, all of it is looked at.
        if len(word) > 6 or not (place == "archive" or place.endswith((".gz", ".html")))
        if word.encode() in content.lower() or word.encode().hex().encode() in content.lower()
    ]


def moved(timeline: Timeline) -> list[Span]:
    """A timeline's spans at the time at which every report begins."""
    shift = REPORT_START_NS - int(timeline.columns.start[0])
    return [span._replace(start_ns=span.start_ns + shift, end_ns=span.end_ns + shift) for span in timeline.spans]
