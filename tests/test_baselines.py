"""Baselines: the published figures, and measured rows with what produced them."""

import json

import pytest

from sol_gym.baselines import Baseline, load_table, lookup, published, published_provenance
from sol_gym.errors import ProblemError
from sol_gym.problems import list_ids, load


def row(**changes):
    return {
        "problem": "L1/069_rms_norm",
        "workload_hash": "0123456789abcdef",
        "workload": "w0",
        "device": "h200",
        "sm_clock_mhz": 1980,
        "clock_locked": False,
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "solution_hash": "fedcba9876543210",
        "agent": "compile",
        "round": 0,
        "t_b_ms": 0.25,
        "spread": 0.01,
        "date": "2026-01-02T03:04:05Z",
    } | changes


@pytest.fixture
def table(tmp_path):
    """Writes rows to <root>/h200/<name>.jsonl and returns the root."""

    def write(*rows, name="rms_norm"):
        folder = tmp_path / "h200"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return tmp_path

    return write


@pytest.mark.parametrize("problem_id", list_ids())
def test_published_rows_match_the_workloads(problem_id):
    rows = published(problem_id)
    assert len(rows) == len(load(problem_id).workloads)
    assert all(0 < r.t_sol_ms < r.t_b_ms for r in rows)


def test_the_published_figures_say_what_they_are():
    provenance = published_provenance()
    assert provenance["data_set"] == "nvidia/SOL-ExecBench"
    assert (provenance["device"], provenance["sm_clock_mhz"]) == ("b200", 1500)


def test_an_unknown_problem_has_no_published_rows():
    assert published("L1/999_nothing") is None


def test_a_device_without_rows_has_an_empty_table(tmp_path):
    assert load_table("h200", root=tmp_path) == []
    assert lookup("h200", root=tmp_path) == {}


def test_rows_carry_what_produced_them(table):
    (baseline,) = load_table("h200", root=table(row()))
    assert baseline == Baseline.model_validate(row())
    assert baseline.date.utcoffset().total_seconds() == 0


def test_lookup_is_by_the_content_that_was_measured(table):
    root = table(row(), row(workload="w1", workload_hash="1" * 16, t_b_ms=0.5))
    found = lookup("h200", root=root)
    assert {key: b.t_b_ms for key, b in found.items()} == {
        row()["workload_hash"]: 0.25,
        "1" * 16: 0.5,
    }


def test_a_later_row_replaces_an_earlier_one(table):
    root = table(row(), row(t_b_ms=0.2, round=3))
    assert lookup("h200", root=root)[row()["workload_hash"]].t_b_ms == 0.2


def test_a_changed_file_is_read_again(table):
    root = table(row())
    assert len(load_table("h200", root=root)) == 1
    table(row(), row(workload="w1"))
    assert len(load_table("h200", root=root)) == 2
    table(row(workload="w2"), name="more")
    assert len(load_table("h200", root=root)) == 3


def test_a_row_of_another_device_is_refused(table):
    with pytest.raises(ProblemError, match=r"rms_norm\.jsonl:1: field device is 'h100'.*'h200'"):
        load_table("h200", root=table(row(device="h100")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"t_b_ms": 0}, "field t_b_ms"),
        ({"spread": -0.1}, "field spread"),
        ({"round": -1}, "field round"),
        ({"date": "2026-01-02T03:04:05"}, "field date"),
        ({"time": 1}, "field time"),
    ],
)
def test_a_malformed_row_is_named_with_line_and_field(table, changes, message):
    with pytest.raises(ProblemError, match=rf"rms_norm\.jsonl:2: {message}"):
        load_table("h200", root=table(row(), row(**changes)))


def test_a_line_that_is_no_json_is_named(table):
    root = table(row())
    with (root / "h200" / "rms_norm.jsonl").open("a") as file:
        file.write("\n{\n")
    with pytest.raises(ProblemError, match=r"rms_norm\.jsonl:3: not valid JSON"):
        load_table("h200", root=root)


@pytest.mark.parametrize("device", ["", "..", "../h200", "a/b"])
def test_a_device_key_is_a_plain_name(tmp_path, device):
    with pytest.raises(ProblemError, match="not a plain name"):
        load_table(device, root=tmp_path)
