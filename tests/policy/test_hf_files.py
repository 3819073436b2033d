"""The files of a model directory: what is written, when it appears, and damage that is named."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reterm_jax.policy import hf_files
from reterm_jax.policy.hf_files import NewTensor, WeightsError, new_directory, open_tensors, write_tensors

ARRAYS = {
    "odd": np.arange(3, dtype=ml_dtypes.bfloat16),
    "wide": np.arange(8, dtype=np.float32).reshape(2, 4),
    "half": np.arange(5, dtype=np.float16),
    "counts": np.arange(3, dtype=np.int64),
}
KINDS = {"odd": "BF16", "wide": "F32", "half": "F16", "counts": "I64"}


def new_tensors() -> list[NewTensor]:
    return [
        NewTensor(name, KINDS[name], x.shape, x.nbytes, lambda x=x: x.reshape(-1).view(np.uint8))
        for name, x in ARRAYS.items()
    ]


@pytest.fixture
def sharded(tmp_path):
    write_tensors(tmp_path, new_tensors(), max_file_bytes=36)
    return tmp_path


def edit_index(directory, change) -> None:
    path = directory / hf_files.INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_the_library_reads_what_is_written(tmp_path):
    write_tensors(tmp_path, new_tensors(), max_file_bytes=10**6)
    read = load_file(tmp_path / hf_files.SINGLE_NAME)
    assert list(tmp_path.iterdir()) == [tmp_path / hf_files.SINGLE_NAME]
    assert {name: x.tobytes() for name, x in read.items()} == {name: x.tobytes() for name, x in ARRAYS.items()}
    assert {name: (x.dtype, x.shape) for name, x in read.items()} == {n: (x.dtype, x.shape) for n, x in ARRAYS.items()}


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    write_tensors(tmp_path, new_tensors(), max_file_bytes=10**6)
    for name, tensor in open_tensors(tmp_path).items():
        assert tensor.data.ctypes.data % ARRAYS[name].itemsize == 0, name


def test_shards_keep_to_the_limit_and_are_indexed(sharded):
    index = json.loads((sharded / hf_files.INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in ARRAYS.values())
    files = sorted(sharded.glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert all(sum(x.nbytes for x in load_file(path).values()) <= 36 for path in files)
    for name, tensor in open_tensors(sharded).items():
        assert tensor.data.tobytes() == ARRAYS[name].tobytes()
        assert tensor.path.name == index["weight_map"][name]


def test_a_tensor_of_another_dtype_is_named(sharded):
    with pytest.raises(WeightsError, match=r"model-00003-of-00003\.safetensors: tensor counts is I64; only F32, BF16"):
        open_tensors(sharded)["counts"].view()


@pytest.mark.parametrize("keep", [0, 5, 30, -1])
def test_a_truncated_file_is_named(sharded, keep):
    path = sharded / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=rf"{path}: not a complete safetensors file"):
        open_tensors(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}', "\udce9"])
def test_an_index_that_is_none_is_named(sharded, text):
    path = sharded / hf_files.INDEX_NAME
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(WeightsError, match=f"{path}: not an index of safetensors files"):
        open_tensors(sharded)


def phantom(weight_map):
    weight_map["phantom"] = weight_map["odd"]


def misplaced(weight_map):
    weight_map["half"] = weight_map["wide"]


def left_out(weight_map):
    del weight_map["half"]


@pytest.mark.parametrize(("change", "name"), [(phantom, "phantom"), (misplaced, "half"), (left_out, "half")])
def test_an_index_that_lies_is_named_with_the_tensor(sharded, change, name):
    edit_index(sharded, change)
    with pytest.raises(WeightsError, match=rf"{hf_files.INDEX_NAME}: does not list what its files hold: {name}$"):
        open_tensors(sharded)


def test_an_absent_shard_is_named(sharded):
    (sharded / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00001-of-00003.safetensors: named in model.safetensors.index.json"):
        open_tensors(sharded)


def test_a_single_file_beside_another_models_index_is_refused(sharded):
    save_file({"odd": ARRAYS["odd"]}, sharded / hf_files.SINGLE_NAME)
    with pytest.raises(WeightsError, match=r"model\.safetensors: beside model\.safetensors\.index\.json"):
        open_tensors(sharded)


def test_a_directory_appears_when_it_is_complete(tmp_path):
    leftover = tmp_path / ".out.partial" / "old"
    leftover.mkdir(parents=True)
    with new_directory(tmp_path / "out") as unfinished:
        (unfinished / "a").touch()
        assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "out") as unfinished:
        (unfinished / "a").touch()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(WeightsError, match=f"{tmp_path}: not empty"), new_directory(tmp_path):
        pass
    assert (tmp_path / "a").exists()
