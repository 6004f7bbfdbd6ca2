"""Names of compilations: the reason of a recompilation, without torch's lines about the source."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from modtrace.track.torch_ranges import _compilation_name


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (None, "torch.compile 0/1"),
        ("0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3",
         "torch.compile 0/1: tensor 'x' size mismatch at index 0. expected 2, actual 3"),
        ('0/0: self.scale == 1.0      # return x / self.scale  # /home/me/net.py:4 in forward\nUser stack trace:\n  '
         'File "/home/me/net.py", line 4', "torch.compile 0/1: self.scale == 1.0"),
        ("0/0: self.scale == 1.0\nUser stack trace", "torch.compile 0/1: self.scale == 1.0"),
    ],
)  # fmt: skip
def test_why_something_is_compiled_again(reason: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(_metrics={"recompile_reason": reason})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(get_metrics_context=lambda: context))

    assert _compilation_name(SimpleNamespace(compile_id="0/1")) == name
