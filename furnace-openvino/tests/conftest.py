"""A compiled tiny-lm."""

from __future__ import annotations

from typing import Any

import pytest

from furnace.checkpoint import open_checkpoint
from furnace_openvino.compiled import compile_graph
from furnace_openvino.graph import build_graph


@pytest.fixture(scope="session")
def compiled() -> Any:
    """The graph of tiny-lm, compiled in the exact form."""
    with open_checkpoint("tiny-lm") as checkpoint:
        graph = build_graph(checkpoint, precision="exact")
    return compile_graph(graph, threads=2, precision="exact", kv_type="f32")
