"""Every built-in rule against its definition: executed, compared with torch, and its dependence."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from sol_gym.solar.capture import capture
from sol_gym.solar.contents import Contents
from sol_gym.solar.context import Context
from sol_gym.solar.dependence import RULES, needs
from sol_gym.solar.einsum import Einsum
from sol_gym.solar.facts import Facts
from sol_gym.solar.region import Region
from sol_gym.solar.table import TABLE, WITHOUT_EXAMPLE, Example
from sol_gym.solar.trace import Node, Trace, Value, values_in
from sol_gym.solar.work import CONTRACTIONS, Demand, contract, is_contraction

F64 = "float64"
EXAMPLES = [
    pytest.param(name, example, id=f"{name}-{i}")
    for name, examples in TABLE.items()
    for i, example in enumerate(examples)
]


def real(example: Example, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in example.tensors.items():
        dtype = torch.complex128 if name in example.complex else torch.float64
        made[name] = torch.randn(shape, generator=generator, dtype=dtype) + 0.3
    return made


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def called(example: Example, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    constants = {n: torch.tensor(v) for n, v in example.constants.items()}
    scope = {"torch": torch, "aten": torch.ops.aten, **tensors, **constants}
    return first(eval(example.call, scope))


def arguments(example: Example, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {n: t.numpy() for n, t in tensors.items()} | {
        n: np.array(v) for n, v in example.constants.items()
    }


def test_every_rule_has_an_example_or_a_reason():
    rules = {*RULES, *CONTRACTIONS, "convolution"}
    assert rules - TABLE.keys() - WITHOUT_EXAMPLE.keys() == set()
    assert WITHOUT_EXAMPLE.keys() & TABLE.keys() == set()


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_definition_computes_what_torch_does(name, example):
    rule = Einsum.parse(example.rule, example.sizes)
    for seed in range(3):
        tensors = real(example, seed)
        expected = called(example, tensors).numpy()
        found = rule.execute(arguments(example, tensors))["out"]
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def regions(shape: tuple[int, ...], seed: int) -> list[Region]:
    """All, a row, boxes, and two boxes that do not line up."""
    random = np.random.default_rng(seed)

    def box() -> Region:
        axes = {d: random.random(n) < 0.6 for d, n in enumerate(shape)}
        return Region.product(shape, axes)

    made = [Region.full(shape), box(), box(), box().union(box())]
    if shape:
        made.append(
            Region.full(shape).intersect(Region.product(shape, {0: np.arange(shape[0]) == 0}))
        )
        made.append(Region.of_mask(random.random(shape) < 0.4))
    return [r for r in made if r]


def recorded(make_problem, name: str, example: Example) -> tuple[Trace, Contents, Node]:
    out = called(example, real(example))
    body = [f"    {n} = torch.tensor({v!r})" for n, v in example.constants.items()]
    body += [f"    {n} = torch.complex({n}, {n})" for n in example.complex]
    body += [f"    made = {example.call}"]
    body += ["    made = made if isinstance(made, torch.Tensor) else made[0]"]
    body += ["    return torch.view_as_real(made)" if out.is_complex() else "    return made"]
    shape = [*out.shape, 2] if out.is_complex() else list(out.shape)
    dtype = str(out.dtype).removeprefix("torch.") if not out.is_complex() else F64
    source = f"aten = torch.ops.aten\ndef run({', '.join(example.tensors)}):\n" + "\n".join(body)
    problem = make_problem(
        source, {n: (list(s), F64) for n, s in example.tensors.items()}, {"result": (shape, dtype)}
    )
    trace, contents = capture(problem, problem.workloads[0], seed=0)
    nodes = [n for n in trace.nodes() if n.plain_name == name]
    assert nodes, f"{name} was recorded as {[n.name for n in trace.nodes()]}"
    return trace, contents, nodes[-1]


def argument_names(node: Node, example: Example, trace: Trace) -> dict[int, str]:
    """Names of the example's tensors by the ids of the operation's arguments."""
    bases = {id(v.base): n for n, v in trace.inputs.items()}
    names = {}
    for position, value in enumerate(node.inputs):
        name = bases.get(id(value.base))
        if name is None:
            found = [n for n, arg in node.args.items() if any(v is value for v in values_in(arg))]
            name = found[0] if found[0] in {*example.tensors, *example.constants} else None
            if name is None and example.constants:
                name = next(iter(example.constants))
        names[position] = name
    return names


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_rule_needs_what_the_definition_touches(make_problem, name, example):
    trace, contents, node = recorded(make_problem, name, example)
    facts = Facts(trace, contents, {})
    context = Context(facts, contents)
    rule = Einsum.parse(example.rule, example.sizes)
    out = node.outs[0]
    assert isinstance(out, Value)
    names = {
        id(v): n
        for v, n in zip(node.inputs, argument_names(node, example, trace).values(), strict=True)
    }
    values = arguments(example, real(example))
    exact = 0
    for region in itertools.chain.from_iterable(regions(out.shape, s) for s in range(3)):
        mask = region.mask()
        touched = rule.touched(values, {"out": mask})
        work = None
        if is_contraction(node):
            found, work = contract(facts, node, Demand(region, region, 1.0, True))
        else:
            found = list(needs(context, node, {0: region}))
        needed: dict[str, np.ndarray] = {}
        sure: dict[str, bool] = {}
        for value, part in found:
            key = names[id(value)]
            seen = part.mask()
            needed[key] = needed.get(key, np.zeros(seen.shape, dtype=bool)) | seen
            sure[key] = sure.get(key, True) and part.exact
        for key, seen in needed.items():
            if key in example.constants:
                continue  # indices are judged by what they select
            truth = touched.get(key, np.zeros(seen.shape, dtype=bool))
            assert not (seen & ~truth).any(), f"{key}: needs more than is touched"
            if sure[key] and region.exact:
                assert (seen == truth).all(), f"{key}: needs less than is touched"
                exact += 1
        if is_contraction(node):
            counted = 2 * rule.products(values, {"out": mask})
            results = int(mask.sum())
            if work is not None and counted > 2 * results:
                assert work.flops == counted
    assert exact or name in ("masked_scatter", "index_reduce", "bincount"), (
        "no region was followed exactly"
    )


PROBED = {
    "upsample_bilinear2d": ("F.interpolate(x, (6, 5), mode='bilinear')", {"x": (1, 2, 3, 4)}),
    "bilinear downsampling": ("F.interpolate(x, (2, 2), mode='bilinear')", {"x": (1, 1, 8, 8)}),
    "upsample_bicubic2d": ("F.interpolate(x, (6, 8), mode='bicubic')", {"x": (1, 2, 3, 4)}),
    "upsample_bilinear2d_backward": (
        "torch.ops.aten.upsample_bilinear2d_backward(x, [6, 8], [1, 1, 3, 4], False)",
        {"x": (1, 1, 6, 8)},
    ),
    "grid_sampler_2d": (
        "F.grid_sample(x, g.tanh(), align_corners=False)",
        {"x": (1, 1, 3, 3), "g": (1, 2, 2, 2)},
    ),
    "im2col": ("F.unfold(x, 2, stride=3)", {"x": (1, 2, 5, 5)}),
    "col2im": ("F.fold(x, (4, 4), 2, stride=2)", {"x": (1, 8, 4)}),
    "avg_pool3d": ("F.avg_pool3d(x, 2)", {"x": (1, 1, 4, 4, 2)}),
    "max_pool3d_with_indices": ("F.max_pool3d(x, 2)", {"x": (1, 1, 4, 4, 2)}),
    "adaptive_max_pool2d": ("F.adaptive_max_pool2d(x, 2)", {"x": (1, 1, 4, 4)}),
    "max_pool2d_with_indices_backward": (
        "torch.ops.aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1],"
        " False, torch.tensor([[[[0, 3], [8, 11]]]]))",
        {"g": (1, 1, 2, 2), "x": (1, 1, 4, 4)},
    ),
    "reflection_pad2d": ("F.pad(x, (1, 1, 2, 0), mode='reflect')", {"x": (1, 2, 3, 3)}),
    "replication_pad2d": ("F.pad(x, (1, 1, 2, 0), mode='replicate')", {"x": (1, 2, 3, 3)}),
    "native_group_norm_backward": (
        "torch.ops.aten.native_group_norm_backward(g, x, m, r, w, 2, 4, 3, 2, [True, True, True])[0]",
        {"g": (2, 4, 3), "x": (2, 4, 3), "m": (2, 2), "r": (2, 2), "w": (4,)},
    ),
    "layer norm's gradient of the bias": (
        "torch.ops.aten.native_layer_norm_backward(g, x, [4], m, r, w, w, [True, True, True])[2]",
        {"g": (3, 4), "x": (3, 4), "m": (3, 1), "r": (3, 1), "w": (4,)},
    ),
    "native_batch_norm": (
        "torch.ops.aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0]",
        {"x": (2, 3, 4), "w": (3,), "b": (3,)},
    ),
    "searchsorted": ("torch.searchsorted(x.sort().values, g) * 1.0", {"x": (3,), "g": (6,)}),
    "bucketize": ("torch.bucketize(g, torch.tensor([0.1, 0.5])) * 1.0", {"g": (6,)}),
}


@pytest.mark.parametrize("part", ["[...]", "[:1]", "[..., :1]", "[:, :1]"])
@pytest.mark.parametrize("name", PROBED)
def test_what_a_rule_without_a_formula_needs_can_be_felt(make_problem, name, part):
    """Each needed element is changed by itself, and some output has to change."""
    call, shapes = PROBED[name]
    source = (
        f"def run({', '.join(shapes)}):\n    y = {call}\n    y = y.double()\n    return y{part} * 1"
    )
    inputs = {n: (list(s), F64) for n, s in shapes.items()}
    namespace: dict[str, Any] = {}
    exec("import torch\nimport torch.nn.functional as F\n" + source, namespace)
    generator = torch.Generator().manual_seed(3)
    trials = [
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
        for _ in range(6)
    ]
    try:
        expected = [namespace["run"](**trial) for trial in trials]
    except IndexError:
        pytest.skip("the result has too few axes")
    problem = make_problem(source, inputs, {"y": (list(expected[0].shape), F64)})
    trace, contents = capture(problem, problem.workloads[0], seed=0)
    from sol_gym.solar.demand import find_demand

    outcome = find_demand(trace, Facts(trace, contents, {}), contents)
    for n in shapes:
        mask = outcome.read[n].mask()
        for place in np.argwhere(mask):
            felt = False
            for trial, result in zip(trials, expected, strict=True):
                for step in (1.7, -40.0, 40.0, 0.01):
                    changed = trial[n].clone()
                    changed[tuple(place)] += step
                    felt = felt or not torch.equal(
                        namespace["run"](**{**trial, n: changed}), result
                    )
            assert felt, f"{n}{place.tolist()} does not matter"
