"""Problems as data: schema, tolerances, profiles, hashes, export."""

import json

import pytest
from pydantic import ValidationError

from sol_gym.errors import ProblemError
from sol_gym.problem import (
    Definition,
    Pack,
    Problem,
    Tolerance,
    Workload,
    export_problem,
    iter_problem_folders,
    load_problem,
)

REFERENCE = "def run(x, w, eps):\n    return x * w + eps\n"


def definition(**changes):
    data = {
        "name": "scale",
        "axes": {
            "rows": {"type": "var"},
            "width": {"type": "const", "value": 8},
            "half": {"type": "expr", "expression": "width // 2"},
        },
        "inputs": {
            "x": {"shape": ["rows", "width"], "dtype": "bfloat16"},
            "w": {"shape": [], "dtype": "float32"},
            "eps": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"y": {"shape": ["rows", "half", 2], "dtype": "bfloat16"}},
        "reference": REFERENCE,
    }
    return data | changes


def workload(**changes):
    inputs = {
        "x": {"type": "random"},
        "w": {"type": "random"},
        "eps": {"type": "scalar", "value": 1e-5},
    }
    return {"uuid": "w0", "axes": {"rows": 3}, "inputs": inputs} | changes


def problem(definition_changes=None, workloads=None, **changes):
    return Problem.model_validate(
        {
            "id": "L1/000_scale",
            "definition": definition(**(definition_changes or {})),
            "workloads": workloads or [workload()],
        }
        | changes
    )


def test_shapes_and_sizes_are_resolved_in_call_order():
    p = problem()
    tensors = p.tensors(p.workloads[0])
    assert list(tensors) == ["x", "w"]
    assert (tensors["x"].shape, tensors["x"].nbytes) == ((3, 8), 48)
    assert (tensors["w"].shape, tensors["w"].numel) == ((), 1)
    assert p.outputs(p.workloads[0])["y"].shape == (3, 4, 2)
    assert p.workloads[0].scalars == {"eps": 1e-5}


def test_integers_in_shapes_become_text():
    assert Definition.model_validate(definition()).outputs["y"].shape == ["rows", "half", "2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": {}}, "at least one input"),
        ({"outputs": {}}, "at least one input and one output"),
        ({"outputs": {"x": {"shape": ["rows"], "dtype": "int32"}}}, "both inputs and outputs"),
        ({"outputs": {"y": {"shape": None, "dtype": "int32"}}}, "outputs are tensors"),
        ({"axes": {"rows": {"type": "var"}}}, "unknown axis"),
        ({"axes": {"rows": {"type": "vary"}}}, "vary"),
        ({"reference": ""}, "at least 1 character"),
    ],
)
def test_an_inconsistent_definition_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        Definition.model_validate(definition(**changes))


def test_an_expression_over_an_unknown_axis_is_refused():
    axes = definition()["axes"] | {"half": {"type": "expr", "expression": "depth // 2"}}
    with pytest.raises(ValidationError, match=r"'half' = 'depth // 2' uses unknown \['depth'\]"):
        Definition.model_validate(definition(axes=axes))


def test_circular_expressions_are_refused():
    axes = definition()["axes"] | {
        "half": {"type": "expr", "expression": "other"},
        "other": {"type": "expr", "expression": "half"},
    }
    with pytest.raises(ValidationError, match="circular"):
        problem({"axes": axes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": {}}, r"missing \['rows'\]"),
        ({"axes": {"rows": 3, "cols": 4}}, r"unknown \['cols'\]"),
        ({"axes": {"rows": -1}}, "expected 0 or more"),
        ({"inputs": {"x": {"type": "random"}}}, r"missing \['eps', 'w'\]"),
    ],
)
def test_a_workload_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        problem(workloads=[workload(**changes)])


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("eps", {"type": "random"}, "declared as a scalar"),
        ("x", {"type": "scalar", "value": 2}, "declared as a tensor"),
        ("x", {"type": "custom"}, "custom_inputs_entrypoint is not set"),
        ("x", {"type": "safetensors", "path": "a"}, "tensor_key"),
        ("x", {"type": "uniform"}, "uniform"),
    ],
)
def test_an_input_of_the_wrong_kind_is_refused(name, spec, message):
    with pytest.raises(ValidationError, match=message):
        problem(workloads=[workload(inputs=workload()["inputs"] | {name: spec})])


def test_a_problem_without_workloads_is_refused():
    with pytest.raises(ValidationError, match="no workloads"):
        Problem(id="a", definition=Definition.model_validate(definition()), workloads=())


def test_constraints_are_checked_for_every_workload():
    p = problem({"constraints": ["rows < 4"]})
    assert p.definition.bind({"rows": 3})["half"] == 4
    with pytest.raises(ProblemError, match="'rows < 4' does not hold"):
        p.definition.bind({"rows": 4})


def test_constraints_over_values_are_kept_and_not_evaluated(tmp_path):
    p = problem({"constraints": ["rows < 4", "rows == x.sum().item()"]})
    assert p.definition.bind({"rows": 3})["half"] == 4
    assert load_problem(export_problem(p, tmp_path)).definition.constraints[1].startswith("rows ==")
    with pytest.raises(ValidationError, match="contains Call"):
        problem({"constraints": ["rows == unknown.sum().item()"]})


def test_export_keeps_the_pack_and_nulls_of_others(tmp_path):
    p = problem({"hf_id": None}, pack=smoke_pack())
    again = load_problem(export_problem(p, tmp_path))
    assert again.model_dump() == p.model_dump()
    assert json.loads((tmp_path / "definition.json").read_text())["hf_id"] is None
    assert "description" not in json.loads((tmp_path / "definition.json").read_text())


def test_the_default_tolerance_is_the_published_one():
    t = Workload.model_validate(workload(tolerance=None)).tolerance
    assert (t.max_atol, t.max_rtol, t.required_matched_ratio) == (1e-2, 1e-2, 0.99)
    assert t.max_error_cap is None
    assert not t.allow_negative_inf


def test_the_misspelt_ratio_is_understood_and_marked():
    t = Tolerance.model_validate({"required_match_ratio": 0.5})
    assert (t.required_matched_ratio, t.misspelt_ratio_key) == (0.5, True)
    assert not Tolerance.model_validate({"required_matched_ratio": 0.5}).misspelt_ratio_key
    both = Tolerance.model_validate({"required_match_ratio": 0.5, "required_matched_ratio": 0.75})
    assert both.required_matched_ratio == 0.75


def test_an_unknown_tolerance_key_is_refused():
    with pytest.raises(ValidationError, match="max_abs"):
        Tolerance.model_validate({"max_abs": 1.0})


def smoke_pack(**changes):
    smoke = {"axes": {"width": 4}, "workloads": [workload(axes={"rows": 1}) | {"uuid": "s0"}]}
    return {"id": "L1/000_scale", "title": "Scaling", "smoke": smoke | changes}


def test_the_smoke_profile_shrinks_constant_axes():
    p = problem(pack=smoke_pack())
    small = p.with_profile("smoke")
    assert small.outputs(small.workloads[0])["y"].shape == (1, 2, 2)
    assert p.with_profile("full") is p
    assert small.content_hash != p.content_hash
    with pytest.raises(ProblemError, match="load it again"):
        small.with_profile("full")


def test_the_smoke_profile_may_only_override_constants():
    with pytest.raises(ProblemError, match="'rows', which is not a constant axis"):
        problem(pack=smoke_pack(axes={"rows": 1})).with_profile("smoke")


def test_a_missing_smoke_profile_is_said():
    with pytest.raises(ProblemError, match="has no smoke profile"):
        problem().with_profile("smoke")


def test_workloads_can_be_selected_by_index():
    p = problem(workloads=[workload() | {"uuid": f"w{i}"} for i in range(3)])
    assert [w.uuid for w in p.with_workloads([2, 0]).workloads] == ["w2", "w0"]
    with pytest.raises(ProblemError, match="has 3 workloads; there is no workload 3"):
        p.with_workloads([3])


def test_the_content_hash_follows_what_is_computed_and_nothing_else():
    base = problem().content_hash
    assert problem({"description": "other words"}).content_hash == base
    assert problem({"reference": REFERENCE + "\n"}).content_hash != base
    assert problem(workloads=[workload(axes={"rows": 4})]).content_hash != base
    tighter = workload(tolerance={"max_atol": 1e-3})
    assert problem(workloads=[tighter]).content_hash != base


def test_export_and_load_are_inverse(tmp_path):
    extra = workload(note="kept") | {"tolerance": {"required_match_ratio": 0.5}}
    p = problem({"tags": ["kept too"]}, workloads=[extra])
    folder = export_problem(p, tmp_path / "out")
    again = load_problem(folder, problem_id=p.id)
    assert again.workloads[0].model_dump() == p.workloads[0].model_dump()
    assert again.workloads[0].tolerance.required_matched_ratio == 0.5
    assert again.content_hash == p.content_hash
    written = json.loads((folder / "definition.json").read_text())
    assert written["tags"] == ["kept too"]
    assert written["reference"] == (folder / "reference.py").read_text() == REFERENCE
    assert list(iter_problem_folders(tmp_path)) == [folder]


def test_a_recorded_trace_is_read_as_its_workload(tmp_path):
    folder = export_problem(problem(), tmp_path)
    trace = {"definition": "scale", "workload": workload()}
    (folder / "workload.jsonl").write_text(json.dumps(trace) + "\n\n")
    assert load_problem(folder).workloads[0].uuid == "w0"


def test_a_reference_file_stands_in_for_the_missing_field(tmp_path):
    data = definition()
    del data["reference"]
    (tmp_path / "definition.json").write_text(json.dumps(data))
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "workload.jsonl").write_text(json.dumps(workload()))
    p = load_problem(tmp_path / "definition.json")
    assert (p.reference, p.id, p.root) == (REFERENCE, "scale", str(tmp_path))


def test_a_pack_gives_the_problem_its_id(tmp_path):
    folder = export_problem(problem(), tmp_path)
    (folder / "pack.json").write_text(json.dumps(smoke_pack()))
    p = load_problem(folder)
    assert p.id == "L1/000_scale"
    assert isinstance(p.pack, Pack)
