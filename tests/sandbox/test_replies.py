"""A worker's nonsense is the worker's fault; the judge's own errors are nobody's."""

from __future__ import annotations

import pytest

from sol_gym.evaluation import Status
from sol_gym.sandbox import replies
from sol_gym.sandbox.request import Request
from sol_gym.sandbox.timing import Plan
from sol_gym.sandbox.verdict import decide
from sol_gym.sandbox.worker import wire
from sol_gym.solution import Solution
from tests.conftest import RMSNORM

HANDLE = "00" * 64


@pytest.mark.parametrize(
    "value",
    [None, "1", True, -1, 1e9, float("nan"), float("inf"), 10**4000, [1.0], {}],
    ids=lambda value: repr(value)[:12],
)
def test_a_time_must_be_a_number_of_seconds(value):
    with pytest.raises(wire.ProtocolError):
        replies.seconds({"seconds": value})


def test_honest_replies_are_read():
    assert replies.seconds({"seconds": 0.25}) == 0.25
    assert replies.seconds_list({"seconds": [1, 0.5]}, 2) == [1.0, 0.5]
    assert replies.destination_passing({"dps": False}) is False
    assert replies.library_name({"library": "/s/build/a.so"}, "/s/build") == "a.so"
    handles, places = replies.captured(
        {"segments": {"7": HANDLE}, "outputs": [[[7, 0]], [[7, 64]]]}, 2, 1
    )
    assert handles == {7: bytes(64)}
    assert places == [[(7, 0)], [(7, 64)]]


@pytest.mark.parametrize("value", [None, 1.0, [], [1.0], [1.0, "x"]])
def test_as_many_times_as_calls_are_expected(value):
    with pytest.raises(wire.ProtocolError):
        replies.seconds_list({"seconds": value}, 2)


@pytest.mark.parametrize(
    "library",
    [None, 3, "/s/build/../x.so", "/etc/passwd", "/s/build/a.py", "a.so", "/s/build/\0.so"],
)
def test_a_library_lies_in_the_build_folder(library):
    with pytest.raises(wire.ProtocolError):
        replies.library_name({"library": library}, "/s/build")


@pytest.mark.parametrize(
    ("segments", "outputs"),
    [
        (None, []), ({}, None), ({"7": HANDLE}, [[[7, 0]]]), ({"7": "zz" * 64}, [[[7, 0]]] * 2),
        ({"x": HANDLE}, [[[7, 0]]] * 2), ({"7": HANDLE}, [[[8, 0]]] * 2),
        ({"7": HANDLE}, [[[7, -1]]] * 2), ({"7": HANDLE}, [[[7, 0.5]]] * 2),
        ({"7": HANDLE}, [[[7, 0], [7, 0]]] * 2), ({"7": HANDLE}, [[7]] * 2), ({"7": 1}, [[[7, 0]]] * 2),
    ],
)  # fmt: skip
def test_places_of_outputs_must_make_sense(segments, outputs):
    with pytest.raises(wire.ProtocolError):
        replies.captured({"segments": segments, "outputs": outputs}, 2, 1)


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), TypeError("x"), IndexError()])
def test_an_error_of_the_judge_is_no_verdict(error):
    with pytest.raises(type(error)):
        decide(error)


def test_a_broken_protocol_is_a_reward_hack():
    assert decide(wire.ProtocolError("nonsense"))[0] is Status.REWARD_HACK


@pytest.mark.parametrize("value", ["'soon'", "float('nan')", "-1.0", "None"])
def test_a_worker_that_forges_its_clock_breaks_the_protocol(judged, value):
    forge = (
        "import sys\nwire = sys.modules['_sol_gym_worker.wire']\nreal = wire.send\n"
        "def send(sock, message):\n"
        f"    if 'seconds' in message:\n        message['seconds'] = {value}\n"
        "    real(sock, message)\nwire.send = send\n"
    )
    result = judged(RMSNORM + forge).results[0]
    assert result.status is Status.REWARD_HACK
    assert "broke the protocol" in result.message


def test_a_fault_in_the_judge_is_raised_not_blamed_on_the_solution(judge, toy):
    plan = Plan(rounds="three")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        judge.evaluate(Request(toy, Solution.from_text(RMSNORM), timing=False, plan=plan))
