"""Who was late as a page: a picture of ranks × steps, coloured by lateness, and the tables. No script, no network."""

from __future__ import annotations

import base64
import html
import os
import struct
import zlib
from typing import Any

import numpy as np

from ..._tables import Table, to_html
from ..._typing import UInt8Array
from ...write.atomic_file import atomic_writer
from .findings import SlowRun, lateness_matrix
from .slow_report import headline, module_table, rank_table, step_finding_table

__all__ = ["png", "write_lateness_page"]

_MAX_ROWS, _MAX_COLUMNS = 1500, 2000
_TABLE_ROWS = 100
_LEAST_NS = 1e3
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


def write_lateness_page(run: SlowRun, path: str | os.PathLike[str], title: str) -> None:
    """Write the page.

    Args:
        run: who was late.
        path: replaced as a whole.
        title: what the page is called.

    Raises:
        WriteError: the file cannot be written; an existing file there is intact.
    """
    with atomic_writer(path) as file:
        file.write(_page(run, title).encode())


def png(pixels: UInt8Array) -> bytes:
    """Return a PNG of uint8[height, width, 3]."""
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
        *(f"<p>{html.escape(line)}</p>" for line in headline(run)),
        *_picture(run),
    ]
    for heading, table in (
        ("Ranks", rank_table(run, _TABLE_ROWS)),
        ("Modules", module_table(run, _TABLE_ROWS)),
        ("Steps", step_finding_table(run, _TABLE_ROWS)),
    ):
        lines += [f"<h2>{heading}</h2>", *_table(table)]
    return "\n".join([*lines, "</body></html>\n"])


def _table(table: Table) -> list[str]:
    return to_html(table) if table.rows else ["<p>none</p>"]


def _picture(run: SlowRun) -> list[str]:
    matrix, ranks, steps = lateness_matrix(run)
    if not matrix.size:
        return ["<p>There is no collective that several ranks called.</p>"]
    shown = _pooled(matrix)
    most = max(float(np.nanmax(shown, initial=0.0)), 2 * _LEAST_NS)
    data = base64.b64encode(png(_coloured(shown, most))).decode()
    caption = (
        f"Each row is a rank ({ranks[0]} at the top, {ranks[-1]} at the bottom), each column a step ({steps[0]} to "
        f"{steps[-1]}). Colour: how far a rank was behind the median of the others, from "
        f'{_LEAST_NS / 1e3:g} µs <span class="scale"></span> to {most / 1e6:,.3f} ms, logarithmic; grey: not known.'
    )
    alt = "ranks by steps, coloured by lateness"
    image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
    return [f"<figure>{image}<figcaption>{caption}</figcaption></figure>"]


def _pooled(matrix: Any) -> Any:
    """Return the matrix with the worst of neighbouring cells, where it is larger than a picture."""
    for axis, limit in ((0, _MAX_ROWS), (1, _MAX_COLUMNS)):
        size = matrix.shape[axis]
        if size > limit:
            starts = np.unique(np.arange(limit) * size // limit)
            matrix = np.fmax.reduceat(matrix, starts, axis=axis)
    return matrix


def _coloured(matrix: Any, most: float) -> UInt8Array:
    known = np.isfinite(matrix)
    level = np.log(np.clip(np.where(known, matrix, 0), _LEAST_NS, most) / _LEAST_NS) / np.log(most / _LEAST_NS)
    place = level * (len(_COLOURS) - 1)
    low = np.minimum(place.astype(np.int64), len(_COLOURS) - 2)
    part = (place - low)[..., None]
    pixels = _COLOURS[low] * (1 - part) + _COLOURS[low + 1] * part
    pixels[~known] = _UNKNOWN
    coloured: UInt8Array = np.rint(pixels).astype(np.uint8)
    return coloured
