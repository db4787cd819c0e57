"""Both ways to look up embeddings give the rows that the file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from furnace.checkpoint import open_checkpoint
from furnace_torch.embedding import DenseEmbedding, StoredEmbedding


@pytest.mark.parametrize("ids", [[0], [3, 3, 1], list(range(0, 4096, 7))])
def test_rows_as_they_are_in_the_file_equal_those_of_the_whole_table(ids: list[int]) -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        stored = StoredEmbedding(checkpoint.raw("embed"))
        dense = DenseEmbedding(torch.from_numpy(checkpoint.tensor("embed").copy()))
    tokens = torch.tensor(ids)
    rows = stored(tokens)
    assert rows.dtype is torch.float32
    assert torch.equal(rows, dense(tokens))
    rows.zero_()
    assert torch.equal(stored(tokens), dense(tokens))


def test_rows_of_a_quantized_table_equal_those_of_the_whole_table(smollm2: Path) -> None:
    with open_checkpoint(smollm2) as checkpoint:
        stored = StoredEmbedding(checkpoint.raw("embed"))
        dense = DenseEmbedding(torch.from_numpy(checkpoint.tensor("embed").copy()))
    tokens = torch.arange(0, 49_152, 91)
    assert torch.equal(stored(tokens), dense(tokens))
