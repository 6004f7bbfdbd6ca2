"""Names that Python's standard library has on Linux and lacks elsewhere, by the stubs that type checkers read."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import mypy

__all__ = ["Platform", "absent_modules", "absent_names"]

Platform = Literal["win32", "darwin"]
_STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"


def absent_names(module: str, platform: Platform) -> set[str]:
    """Return the public names that a module has on Linux and not on another platform; none where it has no stub."""
    statements = _statements(module)
    names = set(_defined(statements, "linux")) - set(_defined(statements, platform))
    return {name for name in names if not name.startswith("_")}


def absent_modules(platform: Platform) -> set[str]:
    """Return the public modules of which nothing public is left on a platform."""
    names = {path.stem for path in _STUBS.glob("*.pyi") if not path.stem.startswith("_")}
    return {name for name in names if absent_names(name, platform) and not _own(_statements(name), platform)}


@cache
def _statements(module: str) -> list[ast.stmt]:
    """Return what a stub says; nothing where it says the same of each platform."""
    place = _STUBS.joinpath(*module.split("."))
    for path in (place.with_suffix(".pyi"), place / "__init__.pyi"):
        if path.is_file() and "sys.platform" in (text := path.read_text("utf-8")):
            return ast.parse(text).body
    return []


def _own(statements: Sequence[ast.stmt], platform: str) -> set[str]:
    """Return the public names that a module defines; what it imports is its stub's need."""
    names = _defined([node for node in statements if not isinstance(node, ast.ImportFrom)], platform)
    return {name for name in names if not name.startswith("_")}


def _defined(statements: Sequence[ast.stmt], platform: str) -> Iterator[str]:
    here = SimpleNamespace(platform=platform, version_info=sys.version_info)
    for node in statements:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                # A comparison of sys.platform or sys.version_info, which is all that stubs may ask.
                yield from _defined(body if eval(ast.unparse(test), {"sys": here}) else orelse, platform)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
