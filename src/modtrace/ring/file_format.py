"""The bytes of a ring file: a header, the slots, and behind them the name table as an append-only log.

```
0      magic "MODTRACE" · version u32 · 0 u32 · capacity u64 · slots offset u64 · log offset u64
       metadata length u32 · crc32 of metadata u32 · metadata (JSON)
4096   slots: capacity × 32 bytes
…      log: records of (length u32 · crc32 u32 · JSON), until a length of 0 or the end of the file
```

All numbers are little endian.
"""

from __future__ import annotations

import struct

__all__ = ["HEADER", "MAGIC", "MAX_RECORD_BYTES", "RECORD", "SLOTS_OFFSET", "VERSION"]

MAGIC = b"MODTRACE"
VERSION = 2
HEADER = struct.Struct("<8sIIQQQII")
"""What stands before the metadata."""
SLOTS_OFFSET = 4096
"""Bytes before the first slot of a file."""
RECORD = struct.Struct("<II")
"""What stands before each record of the log."""
MAX_RECORD_BYTES = 1 << 20
"""A longer record is damage."""
