"""Fixtures for the GPU; tests that also make sense on the CPU run there too, so that they are tried without a GPU."""

from __future__ import annotations

import pytest
import torch

NO_GPU = "this torch sees no GPU: torch.cuda.is_available() is False"


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The GPU; without one it skips, in CI too."""
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session", params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU, and the CPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    gpu: torch.device = request.getfixturevalue("cuda")
    return gpu
