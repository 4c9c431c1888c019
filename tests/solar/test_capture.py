"""Recording: what is seen, what is known, and that nothing large is ever made."""

from __future__ import annotations

import resource

import pytest
import torch

from sol_gym.device import get_device
from sol_gym.errors import BoundError
from sol_gym.solar import analyze
from sol_gym.solar.capture import capture
from sol_gym.solar.trace import Control, Node

F32, I64 = "float32", "int64"
H200 = get_device("h200")


def record(problem, seed=0):
    return capture(problem, problem.workloads[0], seed=seed)


def names(trace) -> list[str]:
    return [step.name for step in trace.steps if isinstance(step, Node)]


def test_terabytes_are_recorded_without_being_allocated(make_problem):
    n = 2**19
    problem = make_problem(
        "def run(x, w): return (x @ w).relu() + 1",
        {"x": ([n, n], F32), "w": ([n, n], F32)},
        {"y": ([n, n], F32)},
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace, _ = record(problem)
    assert names(trace) == ["mm", "relu", "add"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_views_share_the_memory_of_what_they_view(make_problem):
    problem = make_problem(
        "def run(x): return x.t()[1:].unflatten(1, (2, 2))[:, 0].detach() * 1",
        {"x": ([4, 3], F32)},
        {"y": ([2, 2], F32)},
    )
    trace, _ = record(problem)
    assert names(trace) == ["mul"]
    (scaled,) = (s for s in trace.steps if isinstance(s, Node))
    assert scaled.inputs[0].base is trace.inputs["x"].base


def test_every_write_makes_a_new_version(make_problem):
    problem = make_problem(
        """
        def run(x):
            a = torch.zeros(4, dtype=torch.int64)
            a[1:3] = 5
            b = int(a.sum())
            a += 1
            return x * b * int(a.sum())
        """,
        {"x": ([2], F32)},
        {"y": ([2], F32)},
    )
    trace, _ = record(problem)
    scale = [s.args["other"] for s in trace.steps if isinstance(s, Node) and s.name == "mul"]
    assert scale == [10, 14]
    assert sum(isinstance(s, Control) for s in trace.steps) == 2


@pytest.mark.parametrize(
    "steps",
    [
        "n = int(lengths.max())",
        "n = lengths.tolist()[1]",
        "n = int(lengths.numpy().max())",
        "n = len(torch.arange(9)[torch.arange(9) < lengths.max()])",
        "n = torch.arange(9).masked_select(torch.arange(9) < lengths.max()).shape[0]",
        "n = torch.arange(2).repeat_interleave(lengths).shape[0] - 3",
        "n = torch.bincount(lengths).shape[0] - 1",
        "n = 7 if (lengths > 6).any() else 2",
    ],
)
def test_sizes_read_from_integer_inputs_are_the_real_ones(make_problem, steps):
    problem = make_problem(
        f"""
        def run(x, lengths):
            {steps}
            return x[:n].sum(0)
        def generate(axes, device): return {{"lengths": torch.tensor([3, 7], device=device)}}
        """,
        {"x": ([9, 2], F32), "lengths": ([2], I64)},
        {"y": ([2], F32)},
        custom=("lengths",),
    )
    bound = analyze(problem, problem.workloads[0], H200)
    assert bound.read_bytes == {"x": 7 * 2 * 4, "lengths": 16}
    assert bound.lane == "meta"


def test_constants_made_for_the_device_at_hand_keep_their_values(make_problem):
    problem = make_problem(
        "def run(x): return x[torch.tensor([0, 2], device=x.device)] * 2",
        {"x": ([3, 2], F32)},
        {"y": ([2, 2], F32)},
    )
    assert analyze(problem, problem.workloads[0], H200).read_bytes == {"x": 16}


def test_routing_by_floats_is_computed_and_nothing_else_is(make_problem):
    # The experts would take 2^42 operations, the router 2^24.
    problem = make_problem(
        """
        def run(x, router, experts):
            chosen = (x @ router).topk(2, dim=-1).indices
            rows = [sum(x[t] @ experts[e] for e in chosen[t].tolist()) for t in range(len(x))]
            return torch.stack(rows)
        """,
        {"x": ([4, 2**16], F32), "router": ([2**16, 8], F32), "experts": ([8, 2**16, 2**16], F32)},
        {"y": ([4, 2**16], F32)},
    )
    bound = analyze(problem, problem.workloads[0], H200, precision="declared")
    assert bound.lane == "real" and bound.complete
    assert bound.work == {"fp32": 2 * 4 * 8 * 2**16 + 2 * 4 * 2 * 2**32}
    read, rest = divmod(bound.read_bytes["experts"], 2**34)
    assert 2 <= read <= 8 and rest == 0


def test_routing_that_costs_too_much_is_assumed_to_read_the_least(make_problem):
    problem = make_problem(
        """
        def run(x, w, router, experts):
            chosen = (x @ w @ router).topk(2, dim=-1).indices
            return torch.einsum("th,tkhi->ti", x, experts[chosen])
        """,
        {
            "x": ([64, 2**15], F32),
            "w": ([2**15, 2**15], F32),
            "router": ([2**15, 8], F32),
            "experts": ([8, 2**15, 16], F32),
        },
        {"y": ([64, 16], F32)},
    )
    bound = analyze(problem, problem.workloads[0], H200)
    assert not bound.complete and "top-k" in " ".join(bound.notes)
    assert bound.read_bytes["experts"] == 2 * 2**15 * 16 * 4


def test_seed_decides_which_rows_are_named_and_leaves_torchs_generator_alone(make_problem):
    problem = make_problem(
        """
        def run(ids, table): return table[ids]
        def generate(axes, device): return {"ids": torch.randint(0, 999, (500,), device=device)}
        """,
        {"ids": ([500], I64), "table": ([999, 4], F32)},
        {"y": ([500, 4], F32)},
        custom=("ids",),
    )
    torch.manual_seed(5)
    state = torch.get_rng_state()
    read = [
        analyze(problem, problem.workloads[0], H200, seed=s).read_bytes["table"] for s in (0, 0, 1)
    ]
    assert read[0] == read[1] != read[2]
    assert torch.equal(state, torch.get_rng_state())


def test_errors_name_the_problem_and_what_is_wrong(make_problem):
    shapes = {"x": ([2, 3], F32)}
    wrong_shape = make_problem("def run(x): return x.t()", shapes, {"y": ([2, 3], F32)})
    with pytest.raises(BoundError, match=r"\[\[3, 2\]\], the definition says \[\[2, 3\]\]"):
        record(wrong_shape)
    broken = make_problem("def run(x): return x @ x", shapes, {"y": ([2, 3], F32)})
    with pytest.raises(BoundError, match="recording the reference failed"):
        record(broken)
    nameless = make_problem("def forward(x): return x", shapes, {"y": ([2, 3], F32)})
    with pytest.raises(BoundError, match="no function 'run'"):
        record(nameless)
