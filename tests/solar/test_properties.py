"""What may not change a bound, and in which order bounds have to stand, over problems of the library."""

from __future__ import annotations

import ast
import itertools

import pytest

from sol_gym.device import get_device
from sol_gym.problem import Problem, RandomInput, TensorSpec
from sol_gym.problems import load
from sol_gym.solar import Bound, analyze

B200 = get_device("b200-1500")
PROBLEMS = (
    *("L1/015", "L1/033", "L1/040", "L1/054", "L1/067", "L1/069", "L1/092"),
    *("L2/005", "L2/020", "L2/036", "L2/078", "Quant/006", "FIB/004"),
)


def bound_of(problem: Problem, index: int = 0) -> Bound:
    return analyze(problem, problem.workloads[index], B200)


def with_lines(problem: Problem, lines: str, *, extra: str | None = None) -> Problem:
    """The problem with lines put before the first of `run`, and perhaps another input, a tensor."""
    tree = ast.parse(problem.reference)
    (run,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "run")
    run.body[:0] = ast.parse(lines).body
    definition = problem.definition
    workloads = problem.workloads
    if extra is not None:
        run.args.args.append(ast.arg(extra))
        spec = TensorSpec(shape=["4096", "33"], dtype="bfloat16")
        definition = definition.model_copy(update={"inputs": definition.inputs | {extra: spec}})
        workloads = tuple(
            w.model_copy(update={"inputs": dict(w.inputs) | {extra: RandomInput(type="random")}})
            for w in workloads
        )
    definition = definition.model_copy(update={"reference": ast.unparse(tree)})
    return problem.model_copy(update={"definition": definition, "workloads": workloads})


def floats(problem: Problem) -> list[str]:
    tensors = problem.tensors(problem.workloads[0])
    return [n for n, t in tensors.items() if t.dtype in ("float32", "bfloat16", "float16")]


def counts(bound: Bound) -> tuple:
    return bound.work, bound.read_bytes, bound.write_bytes, bound.t_sol_ms


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_dead_operations_change_nothing(problem_id):
    problem = load(problem_id, profile="smoke")
    name = floats(problem)[0]
    lines = f"_dead = {name}.float().flatten()[None] @ {name}.float().flatten()[:, None]\n_dead = _dead.exp().sum()"
    assert counts(bound_of(with_lines(problem, lines))) == counts(bound_of(problem))


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_unread_inputs_change_nothing(problem_id):
    problem = load(problem_id, profile="smoke")
    other = bound_of(with_lines(problem, "_gone = unread.float() + 1", extra="unread"))
    assert other.read_bytes.pop("unread") == 0
    assert counts(other) == counts(bound_of(problem))


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_redundant_copies_change_nothing(problem_id):
    problem = load(problem_id, profile="smoke")
    lines = "\n".join(
        f"{n} = {n}.clone()\n{n} = {n}.unsqueeze(0).contiguous().squeeze(0)"
        for n in floats(problem)
    )
    assert counts(bound_of(with_lines(problem, lines))) == counts(bound_of(problem))


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_needed_is_at_most_as_written_is_at_most_unfused(problem_id):
    for profile in ("smoke", "full"):
        bound = bound_of(load(problem_id, profile=profile))
        assert 0 <= bound.flops <= bound.as_written_flops
        assert 0 < bound.total_bytes <= bound.unfused_bytes
        # Neither a chip without a clock nor one without capacity makes a bound smaller.
        assert bound.t_sol_ms >= bound.memory_ms


@pytest.mark.parametrize("problem_id", [p for p in PROBLEMS if p not in ("L1/067",)])
def test_larger_axes_never_make_a_bound_smaller(problem_id):
    problem = load(problem_id)
    bounds = [bound_of(problem, i) for i in range(min(8, len(problem.workloads)))]
    compared = 0
    for (i, a), (j, b) in itertools.permutations(enumerate(bounds), 2):
        small, large = problem.workloads[i].axes, problem.workloads[j].axes
        if all(small[x] <= large[x] for x in small):
            compared += 1
            assert a.t_sol_ms <= b.t_sol_ms * (1 + 1e-12)
            assert a.flops <= b.flops and a.total_bytes <= b.total_bytes
    assert compared
