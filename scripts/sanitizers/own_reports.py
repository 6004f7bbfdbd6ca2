"""Print the sanitizers' reports in a folder, without races of torch with itself; exit with 1 where any is left.

Torch is not built with ThreadSanitizer, which so does not see the counters by which torch keeps memory alive, but does
see it write and free that memory. Both accesses of such a race are made by torch. What our engine reads or writes is
an access of its own, and is reported whoever made the other.

usage: own_reports.py FOLDER
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_COUNT = re.compile(r"ThreadSanitizer: reported \d+ warnings")
_ACCESS = re.compile(r"^  (?:Previous )?(?:atomic )?(?:read|write) of size \d+ at .*:$", re.IGNORECASE)
_FRAME = re.compile(r"^    #\d+ .*\((?:.*/)?([^/()]+)\+0x[0-9a-f]+\)$")
_TORCH = re.compile(r"lib(?:torch|c10)\w*\.so")
# What others call to read, write and free memory: the frame behind it is the one that did.
_BETWEEN = re.compile(r"lib(?:tsan|stdc\+\+)\.so")


def reports(text: str) -> Iterator[str]:
    """Yield each report of a sanitizer's log."""
    for part in re.split(r"^=+\n", text, flags=re.MULTILINE):
        if part.strip() and not _COUNT.fullmatch(part.strip()):
            yield part


def is_torch_alone(report: str) -> bool:
    """Whether it is a race of two accesses, both made by torch."""
    if "WARNING: ThreadSanitizer: data race" not in report:
        return False
    stanzas = [stanza.splitlines() for stanza in report.split("\n\n")]
    accesses = [lines[at + 1 :] for lines in stanzas for at, line in enumerate(lines) if _ACCESS.match(line)]
    return len(accesses) == 2 and all(_TORCH.match(_library(frames)) for frames in accesses)


def _library(frames: list[str]) -> str:
    """Return the library whose code made an access; empty where that is not known."""
    libraries = [match[1] if (match := _FRAME.match(line)) else "" for line in frames]
    return next((library for library in libraries if not _BETWEEN.match(library)), "")


def main(folder: Path) -> int:
    """Print what is left."""
    all_reports = [report for path in sorted(folder.iterdir()) for report in reports(path.read_text(errors="replace"))]
    left = [report for report in all_reports if not is_torch_alone(report)]
    print("".join(left), end="")
    print(f"reports: {len(left)}, and {len(all_reports) - len(left)} of torch with itself", file=sys.stderr)
    return bool(left)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
