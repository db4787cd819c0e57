"""The arithmetic of ``benchmarks.quality``, and the file that llama-perplexity writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 11


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks, which are no installed package."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def random_logits(rows: int) -> np.ndarray:
    return np.random.default_rng(7).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


def test_the_score_agrees_with_torch(benchmark: Any) -> None:
    quality = benchmark("quality")
    ours, theirs = random_logits(6)[:3], random_logits(6)[3:]
    following = [4, 0, 10]
    found = quality.score(quality.log_softmax(ours), quality.log_softmax(theirs), following)
    reference, other = (torch.log_softmax(torch.from_numpy(one).double(), 1) for one in (ours, theirs))
    kl = torch.nn.functional.kl_div(other, reference, reduction="batchmean", log_target=True)
    assert found.kl == pytest.approx(float(kl), rel=1e-5)
    assert found.nll == pytest.approx(float(torch.nn.functional.nll_loss(other, torch.tensor(following))), rel=1e-5)
    assert found.top1 == pytest.approx(float((reference.argmax(1) == other.argmax(1)).double().mean()))


def write_llama_file(path: Path, tokens: list[int], log_probs: np.ndarray) -> None:
    """As log_softmax and process_logits of llama.cpp's perplexity.cpp do, for one window."""
    content = b"_logits_" + np.array([len(tokens), VOCABULARY, 1, *tokens], "<i4").tobytes()
    for row in log_probs:
        scale = (row.max() - row.min()) / 65535
        content += np.array([scale, row.min()], "<f4").tobytes()
        numbers = np.rint((row - row.min()) / scale).astype("<u2")
        content += np.append(numbers, [0] * (VOCABULARY % 2)).astype("<u2").tobytes()
    path.write_bytes(content)


def test_the_file_of_llama_perplexity_is_read(benchmark: Any, tmp_path: Path) -> None:
    log_probs = benchmark("quality").log_softmax(random_logits(3))
    tokens = list(range(8))
    write_llama_file(tmp_path / "file", tokens, log_probs)
    with benchmark("quality_llama").LlamaLogProbs(tmp_path / "file", [*tokens, 9, 9]) as read:
        np.testing.assert_allclose(read(0, tokens), log_probs, atol=np.ptp(log_probs) / 65535)


def test_a_text_that_llama_tokenizes_otherwise_is_refused(benchmark: Any, tmp_path: Path) -> None:
    write_llama_file(tmp_path / "file", list(range(8)), benchmark("quality").log_softmax(random_logits(3)))
    with pytest.raises(ValueError, match="from number 2 on"):
        benchmark("quality_llama").LlamaLogProbs(tmp_path / "file", [0, 1, 5, 3, 4, 5, 6, 7])


def test_only_what_is_generated_is_replaced_in_a_page(benchmark: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- speed: generated -->\nold\n<!-- speed: end -->\nafter\n", encoding="utf-8")
    benchmark("engines_report").put_into_page(page, "speed", "new\n")
    expected = "before\n<!-- speed: generated -->\n\nnew\n\n<!-- speed: end -->\nafter\n"
    assert page.read_text(encoding="utf-8") == expected
    with pytest.raises(ValueError, match="has no lines"):
        benchmark("engines_report").put_into_page(page, "quality", "new")


def test_the_fast_form_is_not_measured_where_it_would_be_the_exact_one(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = pytest.importorskip("furnace_openvino.compiled")
    monkeypatch.setattr(compiled, "usable_precision", lambda wanted: "exact")
    quality = benchmark("quality")
    with pytest.raises(quality.MissingError, match="would get the exact form"):
        quality._openvino_forms()["furnace-openvino, fast"](None, None)
