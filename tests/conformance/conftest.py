"""Cleanup after each case."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def end_process_group() -> Iterator[None]:
    """End the process group of a case: it would give its rank to the next test."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
