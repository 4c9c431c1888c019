"""The importer: facts in, data files out, the same at every run."""

import json
import runpy
from pathlib import Path

import pytest

from sol_gym.errors import ProblemError
from sol_gym.problem import load_problem

FILE = Path(__file__).parents[2] / "tools" / "import_catalogue.py"
ID = "L1/000_scale"


def workload(**changes):
    inputs = {"x": "random", "ids": "safetensors", "flag": "custom", "eps": 1e-5, "stray": "custom"}
    return {
        "axes": {"rows": 3, "mode": 1},
        "inputs": inputs,
        "tolerance": {"max_atol": 0.1, "required_match_ratio": 0.98},
        "b200_sol_ms": 0.001,
        "b200_baseline_ms": 0.25,
    } | changes


@pytest.fixture
def facts(tmp_path):
    """Writes a facts file and returns the catalogue folder."""

    def write(*workloads):
        data = {
            "id": ID,
            "axes": {"rows": "var", "width": 8, "half": "width // 2"},
            "inputs": {
                "x": {"shape": ["rows", "half", 2], "dtype": "float32"},
                "ids": {"shape": ["rows"], "dtype": "int32"},
                "flag": {"shape": None, "dtype": "bool"},
                "eps": {"shape": None, "dtype": "float32"},
            },
            "outputs": {"y": {"shape": ["rows", "width"], "dtype": "float32"}},
            "workloads": list(workloads),
        }
        file = tmp_path / "facts" / f"{ID}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data))
        return tmp_path / "facts"

    return write


def run(catalogue, repository, *options):
    main = runpy.run_path(str(FILE))["main"]
    return main([str(catalogue), "--repository", str(repository), *options])


def contents(folder):
    return {f.relative_to(folder): f.read_text() for f in folder.rglob("*") if f.is_file()}


def test_what_is_written_loads_with_every_fact_in_place(facts, tmp_path):
    run(facts(workload(), workload(tolerance=None)), tmp_path / "out")
    folder = tmp_path / "out" / "problems" / ID
    (folder / "reference.py").write_text("def run(x, ids, flag, eps): ...\n")
    p = load_problem(folder)
    assert p.definition.name == "000_scale"
    assert p.definition.custom_inputs_entrypoint == "generate_inputs"
    assert p.definition.var_axes == ["rows", "mode"]
    first, second = p.workloads
    kinds = {name: spec.type for name, spec in first.inputs.items()}
    assert kinds == {"x": "random", "ids": "custom", "flag": "custom", "eps": "scalar"}
    assert list(p.definition.inputs) == list(first.inputs)
    assert p.tensors(first)["x"].shape == (3, 4, 2)
    assert first.tolerance.required_matched_ratio == 0.98
    assert first.tolerance.misspelt_ratio_key
    assert "tolerance" not in (folder / "workload.jsonl").read_text().splitlines()[1]
    assert first.uuid != second.uuid


def test_a_second_run_changes_nothing(facts, tmp_path):
    catalogue, out = facts(workload(), workload()), tmp_path / "out"
    run(catalogue, out)
    before = contents(out)
    run(catalogue, out)
    assert contents(out) == before


def test_the_hand_written_half_is_read_and_left_alone(facts, tmp_path):
    folder = tmp_path / "out" / "problems" / ID
    folder.mkdir(parents=True)
    pack = json.dumps({"id": ID, "title": "Scaling", "family": "norm"})
    (folder / "pack.json").write_text(pack)
    (folder / "reference.py").write_text("mine")
    run(facts(workload()), tmp_path / "out", "--ids", ID)
    definition = json.loads((folder / "definition.json").read_text())
    assert (definition["description"], definition["op_type"]) == ("Scaling", "norm")
    assert (folder / "pack.json").read_text() == pack
    assert (folder / "reference.py").read_text() == "mine"


@pytest.fixture
def pack(tmp_path):
    """Writes a pack.json and returns the pack's folder."""

    def write(**fields):
        folder = tmp_path / "out" / "problems" / ID
        folder.mkdir(parents=True)
        (folder / "pack.json").write_text(json.dumps({"id": ID, "title": "Scaling"} | fields))
        return folder

    return write


def test_inputs_the_pack_makes_itself_are_custom(facts, pack, tmp_path):
    plain = {"x": "random", "ids": "random", "flag": True, "eps": 1e-5}
    folder = pack(custom_inputs=["x"])
    (folder / "reference.py").write_text("def run(x, ids, flag, eps): ...\n")
    run(facts(workload(inputs=plain), workload(inputs=plain)), tmp_path / "out")
    p = load_problem(folder)
    assert p.definition.custom_inputs_entrypoint == "generate_inputs"
    for w in p.workloads:
        kinds = [spec.type for spec in w.inputs.values()]
        assert kinds == ["custom", "random", "scalar", "scalar"]


def test_without_custom_inputs_there_is_no_generator(facts, pack, tmp_path):
    plain = {"x": "random", "ids": "random", "flag": True, "eps": 1e-5}
    folder = pack()
    run(facts(workload(inputs=plain)), tmp_path / "out")
    assert "custom_inputs_entrypoint" not in (folder / "definition.json").read_text()


def test_a_custom_input_that_is_no_input_is_refused(facts, pack, tmp_path):
    pack(custom_inputs=["weight"])
    with pytest.raises(ProblemError, match=r"custom_inputs names 'weight'.*'x'"):
        run(facts(workload()), tmp_path / "out")


def test_published_times_keep_their_order_and_source(facts, tmp_path):
    out = tmp_path / "out"
    run(facts(workload(), workload(b200_sol_ms=0.002)), out, "--published")
    data = json.loads((out / "baselines" / "b200" / "published.json").read_text())
    assert data["problems"] == {ID: [[0.001, 0.25], [0.002, 0.25]]}
    assert data["provenance"]["revision"] == "63699402"
    assert not (out / "problems").exists()


def test_a_check_writes_nothing(facts, tmp_path):
    run(facts(workload()), tmp_path / "out", "--check")
    assert not (tmp_path / "out").exists()


def test_facts_that_make_no_problem_are_refused_and_not_written(facts, tmp_path):
    catalogue = facts(workload(axes={"mode": 1}))
    with pytest.raises(ValueError, match=r"missing \['rows'\]"):
        run(catalogue, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    strange = facts(workload(inputs=workload()["inputs"] | {"x": "uniform"}))
    with pytest.raises(ProblemError, match="input kind 'uniform'"):
        run(strange, tmp_path / "out")


def test_an_unknown_id_is_refused(facts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(facts(workload()), tmp_path / "out", "--ids", "L1/001_none")
    assert "L1/001_none" in capsys.readouterr().err
