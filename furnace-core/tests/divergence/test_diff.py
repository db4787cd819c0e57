from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from furnace.divergence import PROMPTS, Diff, DiffError, Settings, compare, read_prompts, run_forced, run_greedy
from furnace.divergence.position import read_position

MODELS = Path(__file__).with_name("counting_models.py")
TOKENS = 8


def diff(a: str, b: str, *, margin: float = 0.05) -> Diff:
    """Compare two of the models whose choices are known."""
    settings = Settings(prompts=["the cat"], max_tokens=TOKENS, chat=False, ignore_eos=True)
    of_a = run_greedy(f"python:{MODELS}:{a}", settings)
    return compare(of_a, run_forced(f"python:{MODELS}:{b}", settings, of_a), settings, margin=margin)


def test_an_engine_is_equal_to_itself_at_every_position() -> None:
    found = diff("plain", "plain")
    (prompt,) = found.prompts

    assert found.method == "forced"
    assert (prompt.positions, prompt.equal, prompt.decided, prompt.decided_equal) == (TOKENS,) * 4
    assert prompt.first is None
    assert prompt.largest == 0.0
    assert not found.differs
    assert (found.a.decode_tokens, found.b.decode_tokens) == (TOKENS - 1,) * 2
    assert found.notes == []


def test_every_position_is_compared_also_behind_a_difference() -> None:
    found = diff("plain", "odd")
    (prompt,) = found.prompts

    # B was fed A's tokens, so that it slips where it slips by itself: at 3 and at 5, and nowhere else.
    assert (prompt.positions, prompt.equal, prompt.decided_equal) == (TOKENS, TOKENS - 2, TOKENS - 2)
    assert prompt.first is not None
    assert (prompt.first.position, prompt.first.b) == (3, (prompt.first.a or 0) + 1)
    assert prompt.first.a_lead == pytest.approx(3.0, abs=1e-5)
    assert prompt.first.b_lead == pytest.approx(0.5, abs=1e-5)
    assert found.differs


def test_a_difference_where_a_tosses_a_coin_does_not_count() -> None:
    found = diff("toss_up", "plain")
    (prompt,) = found.prompts

    assert (prompt.equal, prompt.decided, prompt.decided_equal) == (TOKENS - 1, TOKENS - 1, TOKENS - 1)
    assert not found.differs
    assert diff("toss_up", "plain", margin=0.001).differs


def test_an_engine_with_a_scheduler_of_its_own_is_compared_up_to_the_first_difference() -> None:
    found = diff("plain", "own")
    (prompt,) = found.prompts

    assert found.method == "generated"
    assert (prompt.equal, prompt.positions, prompt.decided) == (4, 5, None)
    assert prompt.first is not None
    assert (prompt.first.position, prompt.first.b) == (4, 7)
    assert found.differs
    assert "could not be fed A's tokens" in found.notes[0]


def test_what_does_not_fit_the_context_of_b_is_left_out_and_said() -> None:
    found = diff("plain", "narrow")

    assert found.positions == 4
    assert "only as far as B's context goes" in found.notes[0]


def test_what_an_engine_raises_is_an_error_that_names_it() -> None:
    with pytest.raises(DiffError, match=r"counting_models.py:raising: no luck today"):
        diff("plain", "raising")


def test_logits_that_are_not_finite_are_an_error_that_names_the_engine() -> None:
    with pytest.raises(DiffError, match=r"counting_models.py:broken: the logits are not finite"):
        diff("plain", "broken")


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=200))
def test_a_position_keeps_what_a_softmax_says(scores: list[float]) -> None:
    row = np.array(scores, np.float32)
    position = read_position(row)

    total = math.fsum(math.exp(float(score) - float(row.max())) for score in row)
    assert position.token == int(row.argmax())
    for token, logprob in zip(position.tokens, position.logprobs, strict=True):
        assert logprob == pytest.approx(float(row[token]) - float(row.max()) - math.log(total), abs=1e-9)
    assert position.margin >= 0
    assert sorted(position.logprobs, reverse=True) == position.logprobs


def test_ids_that_no_token_has_are_never_chosen() -> None:
    assert read_position(np.array([1, 9, 3], np.float32), missing=[1]).tokens[:2] == [2, 0]


def test_prompts_are_read_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two \n")
    assert read_prompts(file) == ["one", "  two "]

    file.write_text("\n\n")
    with pytest.raises(DiffError, match="write one a line"):
        read_prompts(file)
    file.write_bytes(b"\xff")
    with pytest.raises(DiffError, match="not UTF-8"):
        read_prompts(file)


def test_there_are_ten_prompts_and_none_twice() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == 10


@pytest.mark.parametrize(("b", "code"), [("plain", 0), ("odd", 1)])
def test_the_command_prints_tables_or_json_and_its_exit_code_says_whether_they_differ(
    b: str, code: int, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\n")
    arguments = [f"python:{MODELS}:plain", f"python:{MODELS}:{b}", "--prompts", str(prompts)]
    run = [sys.executable, "-m", "furnace", "diff", *arguments, "--raw", "--ignore-eos", "--max-tokens", "8"]
    table, data = (
        subprocess.run([*run, *more], capture_output=True, text=True, timeout=240) for more in ([], ["--json"])
    )

    assert (table.returncode, data.returncode) == (code, code)
    assert f"same token at {8 - 2 * code} of 8" in table.stdout
    assert json.loads(data.stdout)["prompts"][0]["equal"] == 8 - 2 * code


def test_a_mistake_in_b_is_told_before_a_runs() -> None:
    run = [sys.executable, "-m", "furnace", "diff", f"python:{MODELS}:plain", "nobody:x"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("furnace: no installed engine has the scheme 'nobody'")
    assert done.stderr.count("\n") == 1
