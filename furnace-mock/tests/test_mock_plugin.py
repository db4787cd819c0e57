"""The plugin, and the fixture for other packages' tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import furnace_mock
from furnace.contracts import API_VERSION, EngineContext, InvalidRequestError
from furnace_mock import Level, MockEngine, MockOptions, build_mock
from furnace_mock.plugin import furnace_engine


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_the_hook_gives_a_factory_for_this_furnace() -> None:
    factory = furnace_engine()
    assert factory.api_version == API_VERSION
    assert factory.options is MockOptions
    options = msgspec.convert({"level": "engine", "max_context": "99"}, MockOptions, strict=False)
    engine = factory.create("lorem", options, EngineContext())
    assert isinstance(engine, MockEngine)
    assert (engine.name, engine.max_context) == ("lorem", 99)
    with pytest.raises(InvalidRequestError, match="there is no mock"):
        factory.create("nothing", options, EngineContext())


def test_unknown_options_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="speling"):
        msgspec.convert({"speling": 1}, MockOptions)


@pytest.mark.parametrize("level", Level)
def test_the_context_goes_before_the_options(level: Level) -> None:
    context = EngineContext(max_context=50, kv_tokens=40, chat_template="{{ messages[0].content }}!")
    mock = build_mock("echo", MockOptions(level=level), context)
    assert mock.engine.max_context == 40
    chat = furnace_mock.load_pipeline(chat_template=context.chat_template)[0]
    assert chat.has_chat_template


def test_importing_the_plugin_loads_no_numpy_and_no_tokenizer() -> None:
    heavy = "{'numpy', 'tokenizers', 'litestar', 'jinja2', 'torch'}"
    ended = run_python("-c", f"import sys, furnace_mock.plugin; print(sorted({heavy} & set(sys.modules)))")
    assert (ended.stdout.strip(), ended.stderr) == ("[]", "")


def test_every_exported_name_is_there() -> None:
    for name in furnace_mock.__all__:
        assert getattr(furnace_mock, name).__name__ == name
    assert set(furnace_mock.__all__) <= set(dir(furnace_mock))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        furnace_mock.nothing  # noqa: B018 - the access is what is tested


def test_the_fixture_fails_a_test_that_breaks_the_contract(tmp_path: Path) -> None:
    test = tmp_path / "test_foreign.py"
    test.write_text(
        "import pytest\n"
        "def test_good(mock_engine):\n"
        "    mock = mock_engine('lorem', level='step')\n"
        "    mock.model.release(mock.model.open())\n"
        "def test_bad(mock_engine):\n"
        "    model = mock_engine('lorem').model\n"
        "    with pytest.raises(AssertionError):\n"
        "        model.release(object())\n"
        "def test_wrong_option(mock_engine):\n"
        "    with pytest.raises(ValueError, match='speling'):\n"
        "        mock_engine('lorem', speling=1)\n",
        encoding="utf-8",
    )
    ended = run_python("-m", "pytest", "-q", "-p", "furnace_mock.pytest_plugin", "-p", "no:cacheprovider", str(test))
    assert "3 passed, 1 error" in ended.stdout
    assert "against its contract: release() of a state that is not open" in ended.stdout
