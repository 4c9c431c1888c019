"""Recorded tensors: found by path, matched to the library's problems, refused where they do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from sol_gym.errors import ProblemError
from sol_gym.inputs import InputMaker
from sol_gym.problem import SafetensorsInput
from sol_gym.problems import load
from sol_gym.recorded import find_blob, with_recorded

DECODE = "FIB/012_gqa_paged_decode_h32_kv4_d128_ps1"
NAME = "gqa_paged_decode_h32_kv4_d128_ps1"


@pytest.fixture
def decode():
    """Two of the library's published decode workloads."""
    return load(DECODE).with_workloads([0, 2])


def recorded_tensors(axes):
    last = axes["num_kv_indices"]
    return {
        "kv_indptr": torch.tensor([0, last], dtype=torch.int32),
        "kv_indices": torch.arange(last, dtype=torch.int32).flip(0).contiguous(),
    }


def blob(index):
    return f"blob/workloads/gqa_paged/{NAME}/{NAME}_{index}.safetensors"


def write(root, problem, *, prefix="./", at=f"workloads/gqa_paged/{NAME}.jsonl", wrap=True):
    """A copy of the data set's files for `problem`: workloads with other uuids, and their blobs."""
    lines = []
    for i, workload in reversed(list(enumerate(problem.workloads))):
        record = workload.model_dump(mode="json") | {"uuid": f"published-{i}"}
        record.pop("tolerance")
        for name, tensor in (tensors := recorded_tensors(workload.axes)).items():
            assert tensor.dtype == torch.int32
            path = prefix + blob(i)
            record["inputs"][name] = {"type": "safetensors", "path": path, "tensor_key": name}
        (root / blob(i)).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, root / blob(i))
        lines.append(json.dumps({"definition": NAME, "workload": record} if wrap else record))
    (root / at).parent.mkdir(parents=True, exist_ok=True)
    (root / at).write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"prefix": "data/flashinfer-trace/"},
        {"at": f"benchmark/FlashInfer-Bench/012_{NAME}/workload.jsonl", "wrap": False},
    ],
)
def test_a_library_problem_takes_the_recorded_tensors_of_its_workloads(decode, tmp_path, layout):
    problem = with_recorded(decode, write(tmp_path, decode, **layout))
    assert [w.uuid for w in problem.workloads] == [w.uuid for w in decode.workloads]
    for workload in problem.workloads:
        drawn = InputMaker(problem, workload, "cpu", seed=0).draw()
        for name, tensor in recorded_tensors(workload.axes).items():
            assert torch.equal(drawn[name], tensor)
        assert drawn["q"].std() > 0.5  # What is random stays random.
        assert workload.tolerance.allow_negative_inf
    assert problem.workload_hash(problem.workloads[0]) != decode.workload_hash(decode.workloads[0])


def test_without_a_folder_the_generators_stay(decode, monkeypatch):
    monkeypatch.delenv("SOL_GYM_BLOBS", raising=False)
    assert with_recorded(decode, None) is decode


def test_the_variable_names_the_folder_for_what_it_has(decode, tmp_path, monkeypatch):
    monkeypatch.setenv("SOL_GYM_BLOBS", str(tmp_path))
    assert with_recorded(decode, None) is decode
    norm, smoke = load("FIB/021"), load(DECODE, profile="smoke")
    assert with_recorded(norm, None) is norm
    write(tmp_path, decode)
    assert with_recorded(smoke, None) is smoke
    inputs = with_recorded(decode, None).workloads[0].inputs
    assert isinstance(inputs["kv_indices"], SafetensorsInput)


def test_a_folder_named_for_what_it_lacks_is_an_error(decode, tmp_path):
    with pytest.raises(ProblemError, match=rf"looked for a file {NAME}\.jsonl"):
        with_recorded(decode, tmp_path)
    with pytest.raises(ProblemError, match="has no recorded inputs"):
        with_recorded(load("FIB/021"), tmp_path)
    with pytest.raises(ProblemError, match="smoke workloads are synthetic"):
        with_recorded(load(DECODE, profile="smoke"), tmp_path)
    with pytest.raises(ProblemError, match=r"--blobs names .*none, which is not a folder"):
        with_recorded(decode, tmp_path / "none")


def test_workloads_that_are_not_among_the_recorded_are_named(decode, tmp_path):
    write(tmp_path, decode.with_workloads([1]))
    with pytest.raises(ProblemError, match=r"no recorded workload for workload 0: axes .*'num_pag"):
        with_recorded(decode, tmp_path)


def test_a_recorded_workload_without_the_tensors_is_refused(decode, tmp_path):
    file = write(tmp_path, decode) / f"workloads/gqa_paged/{NAME}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["workload"]["inputs"]["kv_indptr"] = {"type": "random"}
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ProblemError, match=r"has no safetensors for \['kv_indptr'\]"):
        with_recorded(decode, tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"kv_indptr": torch.zeros(3, dtype=torch.int32)}, r"has shape \[3\], expected \[2\]"),
        ({"kv_indptr": torch.zeros(2)}, "has dtype torch.float32, expected torch.int32"),
        ({"other": torch.zeros(2)}, r"has no tensor 'kv_indptr'; it has \['other'\]"),
    ],
)
def test_a_blob_that_does_not_fit_is_refused(decode, tmp_path, tensors, message):
    problem = with_recorded(decode, write(tmp_path, decode))
    save_file(tensors, tmp_path / blob(0))
    with pytest.raises(ProblemError, match=f"input 'kv_indptr': .*{message}"):
        InputMaker(problem, problem.workloads[0], "cpu")


def test_a_missing_blob_and_a_pointer_to_one_are_told_apart(decode, tmp_path):
    problem = with_recorded(decode, write(tmp_path, decode))
    (tmp_path / blob(0)).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ProblemError, match=r"is a Git LFS pointer.*git lfs pull"):
        InputMaker(problem, problem.workloads[0], "cpu")
    (tmp_path / blob(0)).unlink()
    with pytest.raises(ProblemError, match=r"not found; looked in .*SOL_GYM_BLOBS"):
        InputMaker(problem, problem.workloads[0], "cpu")


def test_a_path_cannot_lead_out_of_the_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("x")
    with pytest.raises(ProblemError, match="leads out of its folder"):
        find_blob(tmp_path / "in", "../secret")
    assert find_blob(tmp_path / "in", str(tmp_path / "secret")) is None
