"""What is cleared up after each case."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """End the process group that a case makes: it would say the rank to whatever test comes next."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
