"""The warning, given once, that collectives cannot be recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modtrace.ring import NameTable
from modtrace.track.collectives import NativeCollectives
from modtrace.track.event_sink import warn_once


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_a_torch_without_the_tap_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*arguments: Any) -> bool:
        raise RuntimeError("no operator c10d::allreduce_")

    native: Any = SimpleNamespace(start_collectives=refuse)
    warn_once.cache_clear()
    for _ in range(2):
        NativeCollectives(native, NameTable()).start()
    warn_once.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        f"collectives are not recorded: torch {torch.__version__} does not take the tap (no operator c10d::allreduce_)"
    ]
