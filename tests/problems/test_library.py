"""The problem library: ids, loading, and errors that name file and field."""

import json
import shutil

import pytest

from sol_gym.errors import ProblemError
from sol_gym.problem import Problem, load_problem
from sol_gym.problems import SUBSETS, folder, list_ids, load, resolve

RMS_NORM = "L1/069_rms_norm"


@pytest.fixture
def copy(tmp_path):
    """A private copy of a pack, to damage."""
    return shutil.copytree(folder(RMS_NORM), tmp_path / "069_rms_norm")


def edit(file, change):
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_ids_are_unique_and_grouped_by_subset_in_order():
    ids = list_ids()
    assert len(ids) == len(set(ids))
    assert ids == [i for subset in SUBSETS for i in sorted(list_ids(subset))]


def test_an_unknown_subset_names_the_subsets():
    with pytest.raises(ProblemError, match=r"'L3'.*L1, L2, Quant, FIB"):
        list_ids("L3")


@pytest.mark.parametrize("problem_id", list_ids())
def test_every_pack_loads_in_both_profiles(problem_id):
    full = load(problem_id)
    assert full.id == full.pack.id == problem_id
    assert full.definition.name == problem_id.split("/")[1]
    assert full.definition.description == full.pack.title
    assert len({w.uuid for w in full.workloads}) == len(full.workloads)
    smoke = load(problem_id, profile="smoke")
    assert (smoke.profile, full.profile) == ("smoke", "full")
    for problem in (full, smoke):
        for workload in problem.workloads:
            assert problem.outputs(workload)


@pytest.mark.parametrize("problem_id", list_ids())
def test_smoke_workloads_are_small(problem_id):
    smoke = load(problem_id, profile="smoke")
    for workload in smoke.workloads:
        arguments = [*smoke.tensors(workload).values(), *smoke.outputs(workload).values()]
        assert sum(a.nbytes for a in arguments) <= 64 * 2**20


def test_loading_twice_gives_the_same_object():
    assert load(RMS_NORM) is load("L1/069")


def test_a_unique_prefix_is_accepted():
    assert resolve("L1/069") == RMS_NORM
    assert folder("L1/069") == folder(RMS_NORM)


def test_an_ambiguous_prefix_names_what_it_could_be():
    with pytest.raises(ProblemError, match=r"beginning of \d+ problem ids: L1/0"):
        resolve("L1/0")


@pytest.mark.parametrize(
    "wrong", ["L1/069_rms_nrm", "l1/069_rms_norm", "rms_norm", "L2/069_rms_norm"]
)
def test_a_mistyped_id_suggests_the_right_one(wrong):
    with pytest.raises(ProblemError, match=f"did you mean .*{RMS_NORM}"):
        load(wrong)


@pytest.mark.parametrize("wrong", ["", "qqqqqqqq"])
def test_an_id_like_no_other_points_to_the_list(wrong):
    with pytest.raises(ProblemError, match=r"no problem.*list_ids"):
        load(wrong)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ProblemError, match=r"'tiny'.*'full' or 'smoke'"):
        load(RMS_NORM, profile="tiny")


def test_a_missing_folder_says_what_a_problem_is(tmp_path):
    with pytest.raises(ProblemError, match=r"definition\.json and workload\.jsonl"):
        load_problem(tmp_path / "none")


def test_broken_json_is_named_with_its_position(copy):
    (copy / "definition.json").write_text('{"name": ')
    with pytest.raises(ProblemError, match=r"definition\.json: not valid JSON.*line 1"):
        load_problem(copy)


def test_a_definition_that_is_no_object_is_refused(copy):
    (copy / "definition.json").write_text("[]")
    with pytest.raises(ProblemError, match="expected an object, found list"):
        load_problem(copy)


def test_a_wrong_field_is_named_with_file_and_value(copy):
    edit(copy / "definition.json", lambda d: d["inputs"]["weight"].update(dtype="float12"))
    with pytest.raises(
        ProblemError, match=r"definition\.json: field inputs\.weight\.dtype.*float12"
    ):
        load_problem(copy)


def test_a_shape_with_an_unknown_axis_is_named(copy):
    edit(copy / "definition.json", lambda d: d["inputs"]["weight"].update(shape=["hiden_size"]))
    with pytest.raises(
        ProblemError, match=r"'weight' uses unknown axis \['hiden_size'\]; known axes"
    ):
        load_problem(copy)


def test_a_missing_reference_is_named(copy):
    (copy / "reference.py").unlink()
    with pytest.raises(ProblemError, match=r"no field 'reference' and no reference\.py"):
        load_problem(copy)


def test_a_broken_workload_is_named_with_its_line(copy):
    lines = (copy / "workload.jsonl").read_text().splitlines()
    record = json.loads(lines[2])
    record["axes"] = {"batch_size": "two"}
    lines[2] = json.dumps(record)
    (copy / "workload.jsonl").write_text("\n".join(lines))
    with pytest.raises(ProblemError, match=r"workload\.jsonl:3: field axes\.batch_size.*'two'"):
        load_problem(copy)


def test_a_workload_that_misses_an_axis_is_named_with_its_number(copy):
    lines = (copy / "workload.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    del record["axes"]["seq_len"]
    lines[1] = json.dumps(record)
    (copy / "workload.jsonl").write_text("\n".join(lines))
    with pytest.raises(ProblemError, match=r"workload 1 .*missing \['seq_len'\]"):
        load_problem(copy)


def test_a_broken_pack_is_named_with_its_field(copy):
    edit(copy / "pack.json", lambda d: d.update(direction="sideways"))
    with pytest.raises(ProblemError, match=r"pack\.json: field direction.*'sideways'"):
        load_problem(copy)


def test_a_problem_survives_the_wire():
    problem = load(RMS_NORM)
    again = Problem.model_validate_json(problem.model_dump_json())
    assert again.workloads == problem.workloads
    assert again.content_hash == problem.content_hash
