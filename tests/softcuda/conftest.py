"""Without soft devices these tests cannot run: `make test-softcuda` gives pytest the plugin that makes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "softcuda.devices" in sys.modules:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason="needs soft CUDA devices: run `make test-softcuda`"))
