"""Rules from a language model: a real HTTP server, the real client, and torch as the judge."""

from __future__ import annotations

import json

import pytest

from sol_gym.device import get_device
from sol_gym.errors import BoundError
from sol_gym.solar import analyze
from sol_gym.solar.rulebook import rulebook
from sol_gym.solar.synthesis import Endpoint, learn, unknown_operations
from tests.chat_server import ChatServer, completion

F32 = "float32"
H200 = get_device("h200")
RIGHT = {"statements": "out[i, j] = sqrt(sum(k)(pow(x1[i, k] - x2[j, k], 2)))"}
WRONG = {"statements": "out[i, j] = sum(k)(abs(x1[i, k] - x2[j, k]))"}
GREEDY = {
    "statements": "s = sum(i, k)(x1[i, k]); out[i, j] = sqrt(sum(k)(pow(x1[i, k] - x2[j, k], 2)))"
    " + s - s"
}


class Model(ChatServer):
    """A server that answers with what it is told, one a request, status codes included."""

    def __init__(self, answers: list) -> None:
        left = iter(answers)

        def answer(_):
            told = next(left)
            status = told if isinstance(told, int) else 200
            text = told if isinstance(told, str) else json.dumps(told)
            return status, {"retry-after": "0"} if status == 429 else {}, completion(text)

        super().__init__(answer)
        self.endpoint = Endpoint("m", self.url, "key")


@pytest.fixture
def distances(make_problem, tmp_path, monkeypatch):
    monkeypatch.setenv("SOL_GYM_CACHE", str(tmp_path / "cache"))
    return make_problem(
        "def run(x, y): return torch.ops.aten._cdist_forward(x, y, 2.0, None)[:, :5]",
        {"x": ([48, 16], F32), "y": ([32, 16], F32)},
        {"d": ([48, 5], F32)},
    )


def bound(problem):
    return analyze(problem, problem.workloads[0], H200)


def test_without_a_rule_the_bound_is_safe_and_names_the_operation(distances):
    found = bound(distances)
    assert found.read_bytes == {"x": 0, "y": 0} and not found.complete
    assert any("_cdist_forward" in note for note in found.notes)
    (node,) = unknown_operations(distances, distances.workloads[0])
    assert node.name == "_cdist_forward"


def test_wrong_proposals_go_back_with_the_difference_until_one_holds(distances):
    pytest.importorskip("openai")
    bound(distances)
    with Model([429, "no json", WRONG, f"Sure: {json.dumps(RIGHT)}"]) as model:
        (outcome,) = learn(distances, distances.workloads[0], model.endpoint)
    assert outcome.accepted and outcome.rounds == 3
    assert "expected" in model.requests[-1]["messages"][-1]["content"]
    assert outcome.file is not None and "sqrt" in outcome.file.read_text()
    # Demand goes through the rule: all of x, the first five rows of y.
    found = bound(distances)
    assert found.complete
    assert found.read_bytes == {"x": 48 * 16 * 4, "y": 5 * 16 * 4}
    assert unknown_operations(distances, distances.workloads[0]) == []


def test_a_rule_that_touches_what_does_not_matter_is_refused(distances):
    pytest.importorskip("openai")
    with Model([GREEDY, GREEDY]) as model:
        (outcome,) = learn(distances, distances.workloads[0], model.endpoint, rounds=2)
    assert not outcome.accepted and "does not change" in outcome.reason
    assert not bound(distances).complete


def test_a_rule_file_that_was_spoilt_is_not_used(distances):
    pytest.importorskip("openai")
    with Model([RIGHT]) as model:
        (outcome,) = learn(distances, distances.workloads[0], model.endpoint)
    file = outcome.file
    file.write_text(file.read_text().replace("sqrt", "exp"))
    rulebook()._verified.clear()  # as in a new process
    assert not bound(distances).complete


def test_an_endpoint_that_does_not_answer_is_named(distances):
    pytest.importorskip("openai")
    with Model([500, 500]) as model:
        endpoint = Endpoint("m", model.endpoint.base_url, "key", attempts=2)
        with pytest.raises(BoundError, match=r"127\.0\.0\.1.*did not answer for model 'm'"):
            learn(distances, distances.workloads[0], endpoint)


def test_learned_contractions_count_as_work(make_problem, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setenv("SOL_GYM_CACHE", str(tmp_path / "cache"))
    problem = make_problem(
        "def run(x, y): return torch.ops.aten._trilinear(x, y, torch.ones(4), [1], [0], [0, 1], [2])",
        {"x": ([24, 4], F32), "y": ([40, 4], F32)},
        {"d": ([24, 40], F32)},
    )
    nodes = unknown_operations(problem, problem.workloads[0])
    if not nodes:
        pytest.skip("recorded as its parts")
    with Model([{"statements": "out[i, j] = sum(k)(i1[i, k] * i2[j, k] * i3[k])"}]) as model:
        (outcome,) = learn(problem, problem.workloads[0], model.endpoint, rounds=1)
    assert outcome.accepted, outcome.reason
    assert bound(problem).complete
