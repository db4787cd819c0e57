"""The right weights for openvino-genai's graph: all of them, or no directory that looks as if it had them."""

from __future__ import annotations

import importlib
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino", reason="the graph is written with openvino")

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_4_BITS = """
import sys
from pathlib import Path
import numpy as np, openvino as ov
from openvino import opset13 as ops
given = ops.parameter([-1, 2], ov.Type.f32)
result = ops.result(ops.multiply(given, ops.constant(np.ones(2, np.float32))))
ov.save_model(ov.Model([result], [given], "m"), Path(sys.argv[3]).with_name("openvino_model.xml"))
"""


@pytest.mark.parametrize(
    ("script", "error"),
    [("raise SystemExit(3)", subprocess.CalledProcessError), (WITHOUT_4_BITS, ValueError)],
)
def test_what_goes_wrong_leaves_no_directory_behind(
    script: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.rivals_genai_weights")
    monkeypatch.setattr(module, "_groups_of_rows", lambda gguf: iter(()))
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{script}")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    directory = tmp_path / "rivals" / "genai-m"
    with pytest.raises(error):
        module.write_right_weights(tmp_path / "m.gguf", directory, python)
    assert list(directory.parent.iterdir()) == []
