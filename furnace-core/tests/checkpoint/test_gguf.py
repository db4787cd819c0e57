from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from furnace.checkpoint import CheckpointError
from furnace.checkpoint.gguf import GgufFile

STRING, ARRAY, UINT32, UINT8 = 8, 9, 4, 0
F32 = 0


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """A valid file with every kind of metadata value, as the gguf package writes it."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -3)
    writer.add_uint16("a.uint16", 60000)
    writer.add_int16("a.int16", -300)
    writer.add_uint32("a.uint32", 1 << 31)
    writer.add_int32("a.int32", -70000)
    writer.add_uint64("a.uint64", 1 << 63)
    writer.add_int64("a.int64", -(1 << 40))
    writer.add_float32("a.float32", 0.25)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "größer")
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(8, dtype=np.float16).reshape(2, 2, 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_metadata_value_is_read(small_gguf: Path) -> None:
    with GgufFile(small_gguf) as file:
        values = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert values == {
        "a.uint8": 200,
        "a.int8": -3,
        "a.uint16": 60000,
        "a.int16": -300,
        "a.uint32": 1 << 31,
        "a.int32": -70000,
        "a.uint64": 1 << 63,
        "a.int64": -(1 << 40),
        "a.float32": 0.25,
        "a.float64": 0.1,
        "a.bool": True,
        "a.string": "größer",
        "a.strings": ("x", "", "日本"),
        "a.numbers": (1, 2, 3),
        "a.nested": ((1, 2), (3,)),
    }
    assert values["a.bool"] is True


def test_tensors_are_read_in_row_major_shape(small_gguf: Path) -> None:
    with GgufFile(small_gguf) as file:
        assert file.tensors["first"].shape == (2, 3)
        np.testing.assert_array_equal(file.tensor("first"), [[0, 1, 2], [3, 4, 5]])
        np.testing.assert_array_equal(file.tensor("second"), np.arange(8).reshape(2, 2, 2))
        assert file.tensor("second").dtype == np.float32


def test_raw_bytes_are_mapped_and_stay_valid_after_close(small_gguf: Path) -> None:
    file = GgufFile(small_gguf)
    raw = file.raw("first")
    assert raw.shape == (2, 12)
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    file.close()
    np.testing.assert_array_equal(raw.view(np.float32), [[0, 1, 2], [3, 4, 5]])


def _string_of_2_to_60(make: Any) -> bytes:
    return make.file([make.text("k") + struct.pack("<IQ", STRING, 1 << 60) + b"x"])


def _array_of_2_to_33(make: Any) -> bytes:
    return make.file([make.entry("k", ARRAY, struct.pack("<IQ", UINT32, 1 << 33))])


def _array_of_2_to_33_empty_arrays(make: Any) -> bytes:
    return make.file([make.entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1 << 33))])


def _deeply_nested_arrays(make: Any) -> bytes:
    return make.file([make.entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 20_000)])


def _many_empty_strings(make: Any) -> bytes:
    count = 2_500_000
    return make.file([make.entry("k", ARRAY, struct.pack("<IQ", STRING, count) + bytes(8 * count))])


def _array_spread_over_keys(make: Any) -> bytes:
    one = struct.pack("<IQ", UINT8, 1_500_000) + bytes(1_500_000)
    return make.file([make.entry(f"k{i}", ARRAY, one) for i in range(2)])


def _with_tensor(shape: tuple[int, ...], kind: int, offset: int, size: int = 64) -> Callable[[Any], bytes]:
    return lambda make: make.file([], [make.tensor("t", shape, kind, offset)], bytes(size))


HOSTILE: dict[str, tuple[Callable[[Any], bytes], str]] = {
    "an empty file": (lambda make: b"", "empty"),
    "another format": (lambda make: b"PK\x03\x04" + bytes(60), "letters GGUF"),
    "a version from the future": (lambda make: make.file(version=4), "version 4"),
    "the old version 1": (lambda make: make.file(version=1), "version 1"),
    "big endian": (lambda make: make.file(version=3 << 24), "big endian"),
    "2^62 metadata entries": (lambda make: make.file(entry_count=1 << 62), "number of metadata entries"),
    "2^62 tensors": (lambda make: make.file(tensor_count=1 << 62), "number of tensors"),
    "one entry more than there are": (lambda make: make.file([], entry_count=1) + b"\xff" * 13, "metadata key 0"),
    "a string of 2^60 bytes": (_string_of_2_to_60, "bytes long"),
    "an array of 2^33 elements": (_array_of_2_to_33, "the length of 'k'"),
    "an array of 2^33 arrays": (_array_of_2_to_33_empty_arrays, "the length of 'k'"),
    "arrays nested 20,000 deep": (_deeply_nested_arrays, "nested"),
    "millions of empty strings": (_many_empty_strings, "the length of 'k'"),
    "arrays too long together": (_array_spread_over_keys, "the length of 'k1'"),
    "a key twice": (lambda make: make.file([make.entry("k", UINT32, bytes(4))] * 2), "appears twice"),
    "a key of 100,000 bytes": (lambda make: make.file([make.entry("k" * 100_000, UINT32, bytes(4))]), "at most"),
    "a key that is not UTF-8": (lambda make: make.file([make.text(b"\xff") + bytes(8)]), "UTF-8"),
    "a value that is not UTF-8": (lambda make: make.file([make.entry("k", STRING, make.text(b"\xff"))]), "UTF-8"),
    "an unknown value type": (lambda make: make.file([make.entry("k", 99, bytes(8))]), "value type 99"),
    "a boolean of 2": (lambda make: make.file([make.entry("k", 7, b"\x02")]), "boolean"),
    "alignment 0": (lambda make: make.file([make.entry("general.alignment", UINT32, bytes(4))]), "power of two"),
    "alignment 48": (
        lambda make: make.file([make.entry("general.alignment", UINT32, struct.pack("<I", 48))]),
        "power of two",
    ),
    "alignment as text": (
        lambda make: make.file([make.entry("general.alignment", STRING, make.text("32"))]),
        "integer",
    ),
    "a tensor twice": (
        lambda make: make.file([], [make.tensor("t", (8,), F32, 0), make.tensor("t", (8,), F32, 32)], bytes(64)),
        "appears twice",
    ),
    "overlapping tensors": (
        lambda make: make.file([], [make.tensor("t", (16,), F32, 0), make.tensor("u", (8,), F32, 32)], bytes(64)),
        "overlap",
    ),
    "a tensor offset behind the file": (_with_tensor((8,), F32, 1 << 40), "file ends"),
    "a tensor offset of 2^64 - 32": (_with_tensor((8,), F32, (1 << 64) - 32), "file ends"),
    "a tensor larger than the file": (_with_tensor((64,), F32, 0), "file ends"),
    "tensor sizes whose product overflows": (_with_tensor((1 << 32, 1 << 32, 2), F32, 0), "file ends"),
    "a tensor without elements": (_with_tensor((8, 0), F32, 0), "no elements"),
    "an unaligned tensor": (_with_tensor((8,), F32, 8), "multiple of 32"),
    "a tensor of 0 dimensions": (_with_tensor((), F32, 0), "0 dimensions"),
    "a tensor of 9 dimensions": (_with_tensor((1,) * 9, F32, 0), "9 dimensions"),
    "an unknown tensor type": (_with_tensor((8,), 250, 0), "type number 250"),
    "rows of half a block": (_with_tensor((48,), 2, 0), "multiple of 32"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_a_clean_error_in_little_time_and_memory(
    case: str, gguf_bytes: Any, write: Callable[[bytes], Path]
) -> None:
    make, message = HOSTILE[case]
    path = write(make(gguf_bytes))
    tracemalloc.start()
    try:
        start = time.process_time()
        with pytest.raises(CheckpointError, match=message) as caught:
            GgufFile(path)
        seconds = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1
    assert peak < 100e6
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))


def test_a_missing_file_and_a_directory_are_clean_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        GgufFile(tmp_path / "nothing.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        GgufFile(tmp_path)


def test_a_file_cut_anywhere_is_a_clean_error(small_gguf: Path, tmp_path: Path) -> None:
    data = small_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    with GgufFile(small_gguf) as file:
        end = max(tensor.offset + tensor.nbytes for tensor in file.tensors.values())
    for length in range(0, end, 3):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            GgufFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_never_raise_anything_but_a_checkpoint_error(
    data: st.DataObject, small_gguf: Path, tmp_path: Path
) -> None:
    content = bytearray(small_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 9))
        change = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8), st.integers(0, (1 << 64) - 1).map(lambda n: n.to_bytes(8, "little"))
            )
        )
        content[place : place + len(change)] = change
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    try:
        with GgufFile(path) as file:
            for name in file.tensors:
                file.raw(name)
                file.tensor(name)
    except CheckpointError:
        pass


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="where there is no smaps nothing says what is resident"
)
def test_what_was_read_of_a_closed_file_is_not_resident_any_more(small_gguf: Path) -> None:
    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        return sum(
            int(next(line for line in lines if line.startswith("Rss:")).split()[1])
            for line in lines
            if line.endswith(str(small_gguf))
        )

    file = GgufFile(small_gguf)
    kept = file.raw(next(iter(file.tensors)))
    before = kept.copy()
    assert resident() > 0
    file.close()
    assert resident() == 0
    np.testing.assert_array_equal(kept, before)
