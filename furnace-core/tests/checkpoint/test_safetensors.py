from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from furnace.checkpoint import CheckpointError
from furnace.checkpoint.safetensors import SafetensorsFile, shard_names


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.linspace(-1, 1, 5, dtype=np.float16),
        "scalar": np.array(2.5, np.float32),
        "empty": np.empty((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, value in tensors.items():
        assert file.tensors[name].shape == value.shape
        np.testing.assert_array_equal(file.tensor(name), value.astype(np.float32))
    raw = file.raw("matrix")
    assert not raw.flags.owndata
    file.close()
    np.testing.assert_array_equal(raw.view(np.float32), tensors["matrix"])


def test_bfloat16_becomes_float32_exactly(write: Callable[[bytes], Path]) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    data = patterns.tobytes()
    path = write(file_of({"t": entry([1 << 16], 0, len(data), "BF16")}, data))
    values = SafetensorsFile(path).tensor("t")
    np.testing.assert_array_equal(values.view(np.uint32), patterns.astype(np.uint32) << 16)


def test_a_type_that_is_no_weight_is_an_error_only_when_it_is_read(write: Callable[[bytes], Path]) -> None:
    file = SafetensorsFile(write(file_of({"t": entry([2], 0, 16, "I64")}, bytes(16))))
    with pytest.raises(CheckpointError, match=r"'t'.*I64"):
        file.tensor("t")


HOSTILE: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "empty"),
    "seven bytes": (bytes(7), "7 bytes"),
    "a header of 2^63 bytes": (struct.pack("<Q", 1 << 63) + bytes(32), "header is 9223372036854775808 bytes"),
    "a header longer than the file": (struct.pack("<Q", 100) + bytes(32), "100 bytes long"),
    "a header of 11 MB": (struct.pack("<Q", 11_000_000) + bytes(11_000_000), "at most"),
    "no JSON": (file_of(b"{"), "JSON"),
    "a list": (file_of([]), "not a JSON object"),
    "JSON that is not UTF-8": (file_of(b'{"\xff": 1}'), "JSON"),
    "JSON nested 100,000 deep": (file_of(b'{"a":' * 100_000), "JSON"),
    "an endless number": (file_of(b'{"a": {"shape": [' + b"9" * 100_000 + b"]}}"), "JSON|size"),
    "a tensor twice": (file_of(b'{"a": {}, "a": {}}'), "'a' appears twice"),
    "a key of a tensor twice": (file_of(b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "'dtype' appears twice"),
    "a tensor that is a number": (file_of({"a": 1}), "'a'.*object"),
    "an unknown dtype": (file_of({"a": entry([1], 0, 4, "F3")}, bytes(4)), "'F3'"),
    "a dtype that is a list": (file_of({"a": {"dtype": []}}), "dtype"),
    "no shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), "shape"),
    "a negative size": (file_of({"a": entry([-1, -1], 0, 4)}, bytes(4)), "shape"),
    "a fractional size": (
        file_of(b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', bytes(4)),
        "shape",
    ),
    "a boolean size": (file_of(b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', bytes(4)), "shape"),
    "sizes whose product overflows": (file_of({"a": entry([1 << 33, 1 << 33], 0, 4)}, bytes(4)), "needs"),
    "many dimensions": (file_of({"a": entry([1] * 1000, 0, 4)}, bytes(4)), "1000 dimensions"),
    "offsets behind the file": (file_of({"a": entry([1], 400, 404)}, bytes(4)), "begins at byte"),
    "offsets in the wrong order": (file_of({"a": entry([1], 4, 0)}, bytes(4)), "data_offsets"),
    "one offset": (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)), "data_offsets"),
    "a shape that is larger than its bytes": (file_of({"a": entry([2], 0, 4)}, bytes(4)), "needs 8 bytes"),
    "a tensor larger than the file": (file_of({"a": entry([2], 0, 8)}, bytes(4)), "file ends"),
    "overlapping tensors": (file_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "'b' begins"),
    "a gap between tensors": (file_of({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)), "'b' begins"),
    "bytes that no tensor has": (file_of({"a": entry([1], 0, 4)}, bytes(8)), "file ends"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_a_clean_error_in_little_time_and_memory(case: str, write: Callable[[bytes], Path]) -> None:
    data, message = HOSTILE[case]
    path = write(data)
    tracemalloc.start()
    try:
        start = time.process_time()
        with pytest.raises(CheckpointError, match=message) as caught:
            SafetensorsFile(path)
        seconds = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1
    assert peak < 100e6
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 700 + len(str(path))


def test_the_largest_header_that_is_read_stays_within_memory(write: Callable[[bytes], Path]) -> None:
    numbers = b",".join([b"1000"] * 1_990_000)
    path = write(file_of(b'{"a": {"dtype": "F32", "shape": [' + numbers + b"]}}"))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_never_raise_anything_but_a_checkpoint_error(data: st.DataObject, tmp_path: Path) -> None:
    valid = file_of({"a": entry([1, 2], 0, 8), "__metadata__": {"x": "y"}, "b": entry([2], 8, 12, "BF16")}, bytes(12))
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(
            st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from([b"9", b"-", b"[", b'"', b"e9", b"0"]))
        )
        content[place : place + len(change)] = change
    path = tmp_path / "changed.safetensors"
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.tensor(name)
        file.close()
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "c:model.safetensors",
        "a\0.safetensors",
        "model.bin",
        7,
        None,
    ],
)
def test_an_index_can_only_name_safetensors_files_beside_it(name: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        shard_names(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_without_a_weight_map_is_a_clean_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="weight_map"):
        shard_names(tmp_path)
