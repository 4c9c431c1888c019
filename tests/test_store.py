import json
import multiprocessing

import pytest

from sol_gym.evaluation import Evaluation, Provenance, Status
from sol_gym.store import Store, StoreError


def evaluation(score, problem="L1/a", status=Status.PASSED, device="h200"):
    provenance = Provenance(
        device=device, device_name="x", profile="full", inputs_profile="compatible",
        problem_hash="0", solution_hash=str(score), date="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    return Evaluation(
        problem=problem, solution="s", status=status, score=score, provenance=provenance
    )


def test_what_is_appended_is_read_back(tmp_path):
    store = Store(tmp_path / "sub" / "results.jsonl")
    records = [evaluation(0.5), evaluation(None, status=Status.INFRA_ERROR)]
    for record in records:
        store.append(record)
    assert list(store) == records


def test_a_missing_file_is_an_empty_store(tmp_path):
    store = Store(tmp_path / "none.jsonl")
    assert list(store) == []
    assert store.best("L1/a", device="h200") is None


def test_the_best_passed_evaluation_of_a_device_is_found(tmp_path):
    store = Store(tmp_path / "r.jsonl")
    for record in (
        evaluation(0.5),
        evaluation(0.7),
        evaluation(0.9, device="cpu"),
        evaluation(0.0, status=Status.TIMEOUT),
    ):
        store.append(record)
    assert store.best("L1/a", device="h200").score == 0.7
    store.append(evaluation(0.8))
    assert store.best("L1/a", device="h200").score == 0.8


def test_half_a_line_of_a_killed_writer_loses_nothing_else(tmp_path):
    store = Store(tmp_path / "r.jsonl")
    store.append(evaluation(0.5))
    with open(store.path, "a") as file:
        file.write('{"problem": "L1/')
    store.append(evaluation(0.6))
    assert [e.score for e in store] == [0.5, 0.6]


def test_a_line_that_is_no_evaluation_is_named(tmp_path):
    store = Store(tmp_path / "r.jsonl")
    store.append(evaluation(0.5))
    with open(store.path, "a") as file:
        file.write(json.dumps({"problem": "x"}) + "\n")
    with pytest.raises(StoreError, match=r"r\.jsonl:2"):
        list(store)


def _append(path, count):
    for _ in range(count):
        Store(path).append(evaluation(0.1))


def test_several_processes_may_append(tmp_path):
    path = tmp_path / "r.jsonl"
    processes = [multiprocessing.Process(target=_append, args=(path, 20)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(list(Store(path))) == 60


def test_the_index_is_rebuilt_when_it_is_deleted(tmp_path):
    store = Store(tmp_path / "r.jsonl")
    store.append(evaluation(0.5))
    store.index().close()
    for file in tmp_path.glob("*.sqlite"):
        file.unlink()
    assert store.best("L1/a", device="h200").score == 0.5
