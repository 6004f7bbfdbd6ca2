"""Print the sanitizers' reports in a folder, except races inside torch itself; exit with 1 if a report is printed.

torch is not built with ThreadSanitizer. So the sanitizer does not see the counters by which torch keeps memory alive,
but sees torch write and free that memory. In such a race, torch makes both accesses. If modtrace's engine makes one of
the accesses, the race is printed.

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
# Libraries whose functions read, write and free memory for their callers: the caller's frame made the access.
_MEMORY_LIBRARY = re.compile(r"lib(?:tsan|stdc\+\+)\.so")


def reports(text: str) -> Iterator[str]:
    """Yield each report of a sanitizer's log."""
    for part in re.split(r"^=+\n", text, flags=re.MULTILINE):
        if part.strip() and not _COUNT.fullmatch(part.strip()):
            yield part


def is_torch_race(report: str) -> bool:
    """Return whether a report is a race between two accesses of torch."""
    if "WARNING: ThreadSanitizer: data race" not in report:
        return False
    stanzas = [stanza.splitlines() for stanza in report.split("\n\n")]
    accesses = [lines[index + 1 :] for lines in stanzas for index, line in enumerate(lines) if _ACCESS.match(line)]
    return len(accesses) == 2 and all(_TORCH.match(_library(frames)) for frames in accesses)


def _library(frames: list[str]) -> str:
    """Return the library whose code made an access; empty if it is not known."""
    libraries = [match[1] if (match := _FRAME.match(line)) else "" for line in frames]
    return next((library for library in libraries if not _MEMORY_LIBRARY.match(library)), "")


def main(folder: Path) -> int:
    """Print the reports that are not races inside torch."""
    all_reports = [report for path in sorted(folder.iterdir()) for report in reports(path.read_text(errors="replace"))]
    own_reports = [report for report in all_reports if not is_torch_race(report)]
    print("".join(own_reports), end="")
    torch_races = len(all_reports) - len(own_reports)
    print(f"reports: {len(own_reports)}, and {torch_races} races inside torch", file=sys.stderr)
    return bool(own_reports)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
