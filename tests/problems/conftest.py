"""What the tests of the references share: loading one, drawing its inputs, judging its outputs."""

from types import SimpleNamespace

import pytest
import torch

from sol_gym.inputs import InputMaker
from sol_gym.problems import load

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _repeatable():
    """Tests draw with torch's global generator; each begins from the same state."""
    torch.manual_seed(0)


class ReferenceRun:
    """The smoke profile of one problem, its reference's functions, and calls of them."""

    def __init__(self, problem_id):
        self.problem = load(problem_id, profile="smoke")
        namespace = {"__name__": "reference"}
        exec(compile(self.problem.reference, f"<reference of {problem_id}>", "exec"), namespace)
        self.module = SimpleNamespace(**namespace)
        self.workloads = self.problem.workloads

    def draw(self, workload, seed=0):
        """Inputs by name, in call order."""
        return InputMaker(self.problem, workload, "cpu", seed=seed).draw()

    def call(self, inputs):
        """Outputs as a tuple."""
        result = self.module.run(*inputs.values())
        return result if isinstance(result, tuple) else (result,)


def matched_ratio(actual, expected, tolerance):
    """Share of the elements within the tolerance."""
    actual, expected = actual.double(), expected.double()
    near = (actual - expected).abs() <= tolerance.max_atol + tolerance.max_rtol * expected.abs()
    if tolerance.allow_negative_inf:
        near |= (actual == expected) & actual.isneginf()
    return near.double().mean().item()


@pytest.fixture
def reference():
    """Function: problem id (or a unique prefix) -> `ReferenceRun`."""
    return ReferenceRun


@pytest.fixture
def assert_matches():
    """Function: (actual, expected, tolerance) -> None, or an AssertionError with the share."""

    def check(actual, expected, tolerance):
        assert actual.shape == expected.shape
        assert matched_ratio(actual, expected, tolerance) >= tolerance.required_matched_ratio

    return check


@pytest.fixture
def assert_same_rounding():
    """Function: (actual, expected) -> None; nearly all elements are equal to the last bit.

    For an expectation computed in float64 with the declared roundings: a rounding too many or too
    few changes about half of the elements, another order of summation next to none.
    """

    def check(actual, expected):
        assert actual.dtype == expected.dtype
        assert (actual == expected).double().mean().item() >= 0.995

    return check
