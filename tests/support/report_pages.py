"""The blocks of bytes in a report's page."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

TYPES = {"f64": "<f8", "i32": "<i4", "u8": "u1"}


def unpack(block: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack_from("<I", block)
    return json.loads(block[4 : 4 + size]), block[4 + size :]


def values(body: bytes, ref: dict[str, Any]) -> list[float]:
    return list(np.frombuffer(body, TYPES[ref["type"]], ref["length"], ref["offset"]).tolist())
