"""Importing all three formats: folders, detection, and that what comes out is a normal problem."""

from __future__ import annotations

import json
import sys

import gymnasium
import pytest

from sol_gym.device import get_device
from sol_gym.envs import register_problem
from sol_gym.errors import ProblemError
from sol_gym.evaluate import Evaluator
from sol_gym.evaluation import Status
from sol_gym.formats import ImportFailure, detect, import_problems
from sol_gym.formats.flashinfer_trace import solution_from
from sol_gym.formats.sol_execbench import from_row
from sol_gym.problem import export_problem, load_problem
from sol_gym.solar import analyze
from sol_gym.solution import load_solution


@pytest.fixture(scope="module")
def evaluator(private_folders):
    with Evaluator("cpu") as running:
        yield running


def row(problem):
    """A row of the public data set's parquet form."""
    record = problem.definition.model_dump(mode="json")
    return {
        "name": record["name"],
        "hf_id": None,
        "description": "Scales.\nAnd shifts.",
        "axes": json.dumps(record["axes"]),
        "custom_inputs_entrypoint": None,
        "inputs": json.dumps(record["inputs"]),
        "outputs": json.dumps(record["outputs"]),
        "reference": record["reference"],
        "workloads": json.dumps([w.model_dump(mode="json") for w in problem.workloads]),
    }


# ---- SOL-ExecBench


def test_a_tree_of_folders_is_imported_with_its_solutions(make_problem, tmp_path, evaluator):
    folder = export_problem(make_problem(), tmp_path / "L1" / "scale")
    (folder / "solution_python.json").write_text(
        json.dumps(
            {
                "name": "dps",
                "definition": "scale",
                "author": "me",
                "spec": {
                    "languages": ["pytorch"],
                    "target_hardware": ["LOCAL"],
                    "entry_point": "k.py::run",
                },
                "sources": [
                    {"path": "k.py", "content": "def run(x, w, eps, y):\n    y[:] = x * w + eps\n"}
                ],
            }
        )
    )
    export_problem(make_problem(name="broken", reference="x = 1\n"), tmp_path / "L1" / "broken")
    (tmp_path / "L1" / "broken" / "workload.jsonl").write_text("{}\n")
    items = list(import_problems(tmp_path / "L1", out=tmp_path / "out"))
    failure, imported = items
    assert isinstance(failure, ImportFailure)
    assert "workload.jsonl:1: field uuid" in failure.message
    assert imported.findings == []
    again = load_problem(tmp_path / "out" / "scale")
    assert again.id == "sol-execbench/scale"
    assert again.content_hash == make_problem().content_hash
    solution = load_solution(tmp_path / "out" / "scale" / "solutions" / "dps.json")
    assert evaluator.evaluate(again, solution, timing=False).status is Status.PASSED
    (tmp_path / "k.py").write_text("def run(x, w, eps):\n    return x * w\n")
    wrong = evaluator.evaluate(tmp_path / "out" / "scale", tmp_path / "k.py", timing=False)
    assert wrong.status is Status.INCORRECT_NUMERICAL


def test_a_parquet_file_gives_the_same_problem_as_the_folder(make_problem, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row(make_problem()), row(make_problem(name="other")) | {"axes": "{"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "0000.parquet")
    assert detect(tmp_path) == detect(tmp_path / "0000.parquet") == "sol-execbench"
    imported, failure = import_problems(tmp_path / "0000.parquet", out=tmp_path / "out")
    assert load_problem(tmp_path / "out" / "scale").content_hash == make_problem().content_hash
    assert imported.problem.pack.title == "Scales."
    assert "row 1, column axes: not valid JSON" in failure.message
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ProblemError, match=r"bad\.parquet: cannot be read as parquet"):
        list(import_problems(tmp_path / "bad.parquet"))


def test_a_row_without_a_column_is_named(make_problem):
    data = row(make_problem())
    assert from_row(data, "t, row 0").problem.id == "sol-execbench/scale"
    del data["reference"]
    with pytest.raises(ProblemError, match="t, row 0: column reference missing"):
        from_row(data, "t, row 0")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ProblemError, match="needs pyarrow, which is not installed"):
        list(import_problems(tmp_path))


# ---- FlashInfer-Trace


def test_a_data_set_is_imported_with_recorded_inputs_solutions_and_traces(
    data_set, tmp_path, evaluator
):
    assert detect(data_set) == "flashinfer-trace"
    out = tmp_path / "out"
    (item,) = import_problems(data_set, out=out, copy_blobs=True)
    assert item.findings == []
    assert [s.name for s in item.solutions] == ["torch_gather"]
    assert any("binding 'tvm-ffi' is not built here" in r for r in item.remarks)
    assert json.loads((out / "gather_d8" / "traces.jsonl").read_text())["solution"]
    problem = load_problem(out / "gather_d8")
    assert (problem.pack.title, problem.pack.family) == ("Rows of a table.", "gather")
    assert problem.definition.model_extra["tags"] == ["status:verified"]
    solution = load_solution(out / "gather_d8" / "solutions" / "torch_gather.json")
    assert evaluator.evaluate(problem, solution, timing=False).status is Status.PASSED
    bound = analyze(problem, problem.workloads[0], get_device("h200"))
    assert bound.read_bytes["table"] == 3 * 8 * 4  # Three distinct rows are recorded.


def test_recorded_inputs_may_stay_where_they_are(data_set, tmp_path, evaluator, monkeypatch):
    (item,) = import_problems(data_set, out=tmp_path / "out")
    folder, code = item.folder, item.problem.reference
    with pytest.raises(ProblemError, match=r"not found; looked in .*--blobs DIR or SOL_GYM_BLOBS"):
        evaluator.evaluate(folder, code, timing=False)
    there = evaluator.evaluate(folder, code, timing=False, blobs=data_set)
    assert there.status is Status.PASSED
    monkeypatch.setenv("SOL_GYM_BLOBS", str(data_set))
    assert evaluator.evaluate(folder, code, timing=False).status is Status.PASSED


def test_a_definition_alone_and_one_without_workloads(data_set):
    file = data_set / "definitions" / "gather" / "gather_d8.json"
    assert detect(file) == "flashinfer-trace"
    (item,) = import_problems(file, audit=False)
    assert len(item.problem.workloads) == 1
    (data_set / "workloads" / "gather" / "gather_d8.jsonl").unlink()
    (item,) = import_problems(file, audit=False)  # The trace names the workload too.
    assert item.problem.workloads[0].uuid == "u0"
    (data_set / "traces" / "me" / "gather" / "gather_d8.jsonl").unlink()
    (failure,) = import_problems(file, audit=False)
    assert "no workloads for 'gather_d8'" in failure.message


@pytest.mark.parametrize(
    ("spec", "content", "expected"),
    [
        ({"language": "Triton", "entry_point": "run"}, "x", (["triton"], "m.py::run", None)),
        ({"language": "cuda", "binding": "torch"}, "x", (["cuda_cpp"], "m.cu::run", "torch")),
        (
            {"language": "cuda"},
            "#include <torch/extension.h>",
            (["cuda_cpp"], "m.cu::run", "torch"),
        ),
    ],
)
def test_solutions_are_translated(spec, content, expected):
    file = "m.cu" if spec["language"] == "cuda" else "m.py"
    record = {
        "name": "s",
        "definition": "d",
        "author": "a",
        "spec": {"entry_point": f"{file}::run", "target_hardware": ["cuda"]} | spec,
        "sources": [{"path": file, "content": content}],
    }
    s = solution_from(record, "here").spec
    assert (s.languages, s.entry_point, s.binding) == expected
    assert s.destination_passing_style is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"language": "tilelang", "entry_point": "m.py::run"}, "language 'tilelang' is not built"),
        ({"language": "cpp", "entry_point": "m.cc::run"}, "binding 'tvm-ffi' is not built"),
        ({"language": "python", "entry_point": "n.py::run"}, "'n.py' is not among the sources"),
    ],
)
def test_solutions_that_cannot_be_built_are_named(spec, message):
    record = {"name": "s", "spec": spec, "sources": [{"path": "m.py", "content": "x"}]}
    with pytest.raises(ProblemError, match=f"here: .*{message}"):
        solution_from(record, "here")


# ---- KernelBench, and all of them


def test_a_kernelbench_problem_is_judged_bounded_and_an_environment(
    kernelbench_file, tmp_path, evaluator
):
    assert detect(kernelbench_file) == detect(tmp_path) == "kernelbench"
    (item,) = import_problems(kernelbench_file, out=tmp_path / "out")
    assert item.findings == [], list(map(str, item.findings))
    problem = load_problem(item.folder)
    kernel = """
import torch
def run(x, factor, shift, linear_weight, linear_bias, norm_weight, norm_bias, random):
    y = torch.nn.functional.linear(x, linear_weight, linear_bias)
    y = torch.nn.functional.batch_norm(y, None, None, norm_weight, norm_bias, training=True)
    y = y + shift + random
    return y * factor + torch.arange(5), y.mean(1)
"""
    evaluation = evaluator.evaluate(problem, kernel)
    assert evaluation.status is Status.PASSED, evaluation.message
    assert 0 < evaluation.score < 1
    forgets = kernel.replace("norm_weight, norm_bias, training", "None, norm_bias, training")
    assert evaluator.evaluate(problem, forgets).status is Status.INCORRECT_NUMERICAL
    env_id = register_problem(item.folder)
    assert register_problem(item.folder) == env_id == "SolGym/kernelbench-7_Scaled_linear-v0"
    env = gymnasium.make(env_id, device="cpu", max_turns=1)
    observation, _ = env.reset(seed=0)
    assert "linear_weight" in observation["prompt"]
    _, reward, _, truncated, info = env.step(kernel)
    assert (info["status"], truncated) == ("PASSED", True)
    assert reward > 0
    env.close()


def test_two_problems_cannot_have_one_environment_id(make_problem, tmp_path):
    problem = make_problem(name="twice").model_copy(update={"id": "twice"})
    register_problem(export_problem(problem, tmp_path / "a"))
    with pytest.raises(ProblemError, match=r"SolGym/twice-v0 is registered for .*a; .*another id"):
        register_problem(export_problem(problem, tmp_path / "b"))


def test_an_existing_folder_is_only_replaced_when_told(make_problem, tmp_path):
    folder = export_problem(make_problem(), tmp_path / "scale")
    out = tmp_path / "out"
    (first,) = import_problems(folder, out=out, audit=False)
    (first.folder / "mine.txt").write_text("keep")
    (refused,) = import_problems(folder, out=out, audit=False)
    assert "exists; --overwrite replaces it" in refused.message
    assert (first.folder / "mine.txt").exists()
    (again,) = import_problems(folder, out=out, audit=False, overwrite=True)
    assert not (again.folder / "mine.txt").exists()
    assert [f.name for f in out.iterdir()] == ["scale"]


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", ".hidden", "a/b"])
def test_a_name_cannot_lead_out_of_the_folder(make_problem, tmp_path, name):
    folder = export_problem(make_problem(name=name), tmp_path / "in")
    (item,) = import_problems(folder, out=tmp_path / "out", audit=False)
    assert item.folder.resolve().parent == tmp_path / "out"


def test_what_is_no_format_says_what_was_looked_for(tmp_path):
    with pytest.raises(ProblemError, match=r"expected folders with definition\.json"):
        detect(tmp_path)
    with pytest.raises(ProblemError, match="does not exist"):
        detect(tmp_path / "none")
    (tmp_path / "definition.json").write_text("{}")
    with pytest.raises(ProblemError, match="no problem's name matches 'x'"):
        list(import_problems(tmp_path, only="x"))
    with pytest.raises(ProblemError, match="--set replaces constants of KernelBench files"):
        list(import_problems(tmp_path, settings={"a": "1"}))
    with pytest.raises(ProblemError, match="there is no format 'csv'"):
        list(import_problems(tmp_path, format="csv"))
    with pytest.raises(ProblemError, match="'definitions/'"):
        list(import_problems(tmp_path, format="flashinfer-trace"))
