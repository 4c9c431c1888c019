"""Demand against the truth: run the reference, and see which input elements matter.

A demanded element that does not matter would make a bound too high, so each one is changed by
itself and some output has to change. Where the demand is exact, all other elements together may be
anything without any output changing.
"""

from __future__ import annotations

import pytest
import torch

from sol_gym.solar.capture import capture
from sol_gym.solar.demand import Outcome, find_demand
from sol_gym.solar.facts import Facts

F32, I64, BOOL = "float32", "int64", "bool"

Reference = tuple[str, dict[str, tuple[list[int], str]], list[list[int]]]
REFERENCES: dict[str, Reference] = {
    # name: (source, inputs, output shapes)
    "slice": ("return x[1:, ::2] * 2", {"x": ([3, 5], F32)}, [[2, 3]]),
    "strided slices meet": ("return x[::2].sum() + x[1, :2].sum()", {"x": ([4, 3], F32)}, [[]]),
    "transpose and reshape": ("return x.t().reshape(2, 6)[0]", {"x": ([3, 4], F32)}, [[6]]),
    "reshape across rows": ("return x.view(-1)[3:8] * 1", {"x": ([3, 4], F32)}, [[5]]),
    "expand": ("return x.expand(3, 4)[1:].clone()", {"x": ([1, 4], F32)}, [[2, 4]]),
    "unbind and stack": (
        "a, b, c = x.unbind(1)\nreturn torch.stack((c, a), 0)",
        {"x": ([2, 3, 2], F32)},
        [[2, 2, 2]],
    ),
    "chunk": ("return x.chunk(3, -1)[1] + 1", {"x": ([2, 9], F32)}, [[2, 3]]),
    "windows": ("return x.unfold(1, 4, 3)[:, 1].sum(-1)", {"x": ([2, 10], F32)}, [[2]]),
    "overlapping windows": ("return x.unfold(0, 3, 1)[::4] * 1", {"x": ([9], F32)}, [[2, 3]]),
    "cat": (
        "return torch.cat((x, y), 1)[:, 2:4] + 0",
        {"x": ([2, 3], F32), "y": ([2, 3], F32)},
        [[2, 2]],
    ),
    "pad": ("return F.pad(x, (2, 1, -1, 0))[:, 1:4] * 1", {"x": ([3, 4], F32)}, [[2, 3]]),
    "flip and roll": ("return x.flip(0).roll(2, 1)[0, :3] * 1", {"x": ([3, 5], F32)}, [[3]]),
    "repeat": ("return x.repeat(2, 3)[3, 4:] * 1", {"x": ([2, 3], F32)}, [[5]]),
    "tril": ("return x.tril(-1).sum(0)", {"x": ([4, 4], F32)}, [[4]]),
    "triu of a product": ("return (x * 2).triu(1)[1:]", {"x": ([4, 4], F32)}, [[3, 4]]),
    "zero mask": ("return x * torch.ones(4, 4).tril()", {"x": ([4, 4], F32)}, [[4, 4]]),
    "where on a fixed mask": (
        "m = torch.arange(4)[:, None] >= torch.arange(4)\nreturn torch.where(m, x, y)",
        {"x": ([4, 4], F32), "y": ([4, 4], F32)},
        [[4, 4]],
    ),
    "reduction": ("return x[:, :2].sum(1, keepdim=True)", {"x": ([3, 4], F32)}, [[3, 1]]),
    "reduction over several": ("return x.mean((0, 2))[1:]", {"x": ([2, 3, 2], F32)}, [[2]]),
    "softmax": ("return x.softmax(-1)[1, :1]", {"x": ([3, 4], F32)}, [[1]]),
    "masked softmax": (
        "m = torch.ones(4, 4, dtype=torch.bool).tril()\n"
        "return x.masked_fill(~m, -torch.inf).softmax(-1)[1:3]",
        {"x": ([4, 4], F32)},
        [[2, 4]],
    ),
    "additive mask": (
        "m = torch.full((4, 4), -torch.inf).triu(1)\nreturn (x + m).softmax(-1)[2]",
        {"x": ([4, 4], F32)},
        [[4]],
    ),
    "cumulative sum": ("return x.cumsum(0)[:2] * 1", {"x": ([4, 2], F32)}, [[2, 2]]),
    "layer norm": (
        "return F.layer_norm(x, (4,), w, b)[1]",
        {"x": ([3, 4], F32), "w": ([4], F32), "b": ([4], F32)},
        [[4]],
    ),
    "group norm": ("return F.group_norm(x, 2)[1]", {"x": ([2, 4, 3], F32)}, [[4, 3]]),
    "fft": ("return torch.fft.rfft(x, n=8)[1].real * 1", {"x": ([2, 5], F32)}, [[5]]),
    "product rows": ("return (x @ y)[1:, :2]", {"x": ([3, 4], F32), "y": ([4, 3], F32)}, [[2, 2]]),
    "batched product": (
        "return torch.einsum('bik,bjk->bij', x, y)[1, :, 2:]",
        {"x": ([2, 3, 4], F32), "y": ([2, 3, 4], F32)},
        [[3, 1]],
    ),
    "product with padding": (
        "return F.pad(x, (0, 2)) @ y",
        {"x": ([3, 2], F32), "y": ([4, 2], F32)},
        [[3, 2]],
    ),
    "product with a triangle": (
        "return torch.ones(3, 3).tril() @ x[:, :2]",
        {"x": ([3, 3], F32)},
        [[3, 2]],
    ),
    "bias": (
        "return F.linear(x, w, b)[:, 1:]",
        {"x": ([2, 3], F32), "w": ([3, 3], F32), "b": ([3], F32)},
        [[2, 2]],
    ),
    "convolution": (
        "return F.conv2d(x, w, b, stride=2, padding=1)[:, 1:, :1]",
        {"x": ([1, 2, 5, 4], F32), "w": ([2, 2, 3, 3], F32), "b": ([2], F32)},
        [[1, 1, 1, 2]],
    ),
    "grouped convolution": (
        "return F.conv1d(x, w, groups=2, dilation=2)[:, :2]",
        {"x": ([2, 4, 7], F32), "w": ([4, 2, 2], F32)},
        [[2, 2, 5]],
    ),
    "transposed convolution": (
        "return F.conv_transpose1d(x, w, stride=2, padding=1)[..., 1:3]",
        {"x": ([1, 2, 4], F32), "w": ([2, 3, 3], F32)},
        [[1, 3, 2]],
    ),
    "index": (
        "return x[torch.tensor([2, 0, 2])][:, :3] * 1",
        {"x": ([4, 4], F32)},
        [[3, 3]],
    ),
    "index of two axes": (
        "return x[:, torch.tensor([0, 1]), torch.tensor([2, 2])] * 1",
        {"x": ([2, 3, 4], F32)},
        [[2, 2]],
    ),
    "boolean index": (
        "return x[torch.tensor([True, False, True])] * 1",
        {"x": ([3, 2], F32)},
        [[2, 2]],
    ),
    "gather": (
        "return x.gather(1, torch.tensor([[0, 2], [1, 1]])) * 1",
        {"x": ([2, 3], F32)},
        [[2, 2]],
    ),
    "embedding": (
        "return F.embedding(torch.tensor([[1, 1], [3, 0]]), w)",
        {"w": ([5, 2], F32)},
        [[2, 2, 2]],
    ),
    "index_select": (
        "return x.index_select(1, torch.tensor([1, 3]))[1:]",
        {"x": ([2, 4], F32)},
        [[1, 2]],
    ),
    "index_add": (
        "return x.index_add(0, torch.tensor([0, 2, 0]), y)[:2]",
        {"x": ([3, 2], F32), "y": ([3, 2], F32)},
        [[2, 2]],
    ),
    "index_put": (
        "out = x.clone()\nout[torch.tensor([1, 3])] = y\nreturn out[2:]",
        {"x": ([4, 2], F32), "y": ([2, 2], F32)},
        [[2, 2]],
    ),
    "scatter": (
        "return x.scatter(1, torch.tensor([[1], [0]]), y)[:1] * 1",
        {"x": ([2, 3], F32), "y": ([2, 1], F32)},
        [[1, 3]],
    ),
    "overwritten slice": (
        "out = x.clone()\nout[:, 1:3] = y\nreturn out",
        {"x": ([2, 4], F32), "y": ([2, 2], F32)},
        [[2, 4]],
    ),
    "overwritten before use": (
        "a = x * 2\na.zero_()\nreturn a + y",
        {"x": ([2, 2], F32), "y": ([2, 2], F32)},
        [[2, 2]],
    ),
    "read between writes": (
        "a = torch.zeros(4)\na[:2] = x\nb = a.sum()\na[1:] = y\nreturn a * b",
        {"x": ([2], F32), "y": ([3], F32)},
        [[4]],
    ),
    "in place through a view": (
        "a = x.clone()\na.view(2, 2)[0].mul_(y)\nreturn a[:3]",
        {"x": ([4], F32), "y": ([2], F32)},
        [[3]],
    ),
    "loop over rows": (
        "s = torch.zeros(3)\nfor t in range(2):\n    s = s * d + x[t]\nreturn s",
        {"x": ([4, 3], F32), "d": ([3], F32)},
        [[3]],
    ),
    "autograd": (
        "x = x.detach().requires_grad_()\n(g,) = torch.autograd.grad(((x @ w) ** 2)[:1].sum(), x)\nreturn g[:1]",
        {"x": ([2, 3], F32), "w": ([3, 2], F32)},
        [[1, 3]],
    ),
}


def demand_of(problem) -> Outcome:
    trace, contents = capture(problem, problem.workloads[0], seed=0)
    return find_demand(trace, Facts(trace, contents, {}), contents)


def loaded(problem):
    namespace: dict = {}
    exec(problem.reference, namespace)
    return namespace["run"]


@pytest.mark.parametrize("name", REFERENCES)
def test_demand_is_what_matters(make_problem, name):
    source, inputs, shapes = REFERENCES[name]
    body = "\n".join("    " + line for line in source.splitlines())
    problem = make_problem(
        f"def run({', '.join(inputs)}):\n{body}\n",
        inputs,
        {f"out{i}": (shape, F32) for i, shape in enumerate(shapes)},
    )
    outcome = demand_of(problem)
    assert not outcome.notes
    run = loaded(problem)
    generator = torch.Generator().manual_seed(1)
    values = {n: torch.randn(shape, generator=generator) + 0.1 for n, (shape, _) in inputs.items()}
    expected = run(**{n: v.clone() for n, v in values.items()})

    def differs(changed: dict[str, torch.Tensor]) -> bool:
        return not torch.equal(
            run(**{n: v.clone() for n, v in (values | changed).items()}), expected
        )

    everything_else = {}
    for n, value in values.items():
        mask = outcome.read[n].mask()
        assert outcome.read[n].exact and mask is not None
        for place in torch.tensor(mask).nonzero():
            changed = value.clone()
            changed[tuple(place)] += 1.7
            assert differs({n: changed}), f"{n}{place.tolist()} does not matter"
        other = value.clone()
        other[~torch.tensor(mask)] = 37.0
        everything_else[n] = other
    assert not differs(everything_else), "something that matters is not demanded"


def test_operation_without_a_rule_demands_nothing_and_is_named(make_problem):
    problem = make_problem(
        "def run(x): return torch.linalg.qr(x)[0]", {"x": ([3, 3], F32)}, {"q": ([3, 3], F32)}
    )
    outcome = demand_of(problem)
    assert outcome.read["x"].count() == 0
    assert any("linalg_qr" in note for note in outcome.notes)
