"""Named input recipes: the published kinds where the published generator contradicts them."""

import pytest
import torch

from sol_gym.errors import ProblemError
from sol_gym.inputs import InputMaker
from sol_gym.problems import list_ids, load

RECIPE = "published-kinds"
CONTRADICTED = ["L2/015", "L2/033", "L2/055", "L2/057", "L2/069", "L2/078"]


def draw(problem):
    return InputMaker(problem, problem.workloads[0], "cpu", seed=0).draw()


def test_the_problems_with_a_recipe_are_those_with_two_published_sources():
    packs = [load(problem_id) for problem_id in list_ids()]
    named = [p.id[:6] for p in packs if p.pack.recipes]
    assert named == CONTRADICTED == [p.id[:6] for p in packs if p.pack.custom_inputs]


@pytest.mark.parametrize("problem_id", CONTRADICTED)
def test_both_ways_of_drawing_run_and_differ_where_the_recipe_says(problem_id):
    by_generator = load(problem_id, profile="smoke")
    by_name = by_generator.with_recipe(RECIPE)
    recipe = by_generator.pack.recipes[RECIPE]
    assert recipe.random == by_generator.pack.custom_inputs
    for kind in by_name.workloads[0].inputs.values():
        assert kind.type in ("random", "scalar")
    assert by_name.workload_hash(by_name.workloads[0]) != by_generator.workload_hash(
        by_generator.workloads[0]
    )
    namespace = {"__name__": "reference"}
    exec(by_name.reference, namespace)
    results = []
    for problem in (by_generator, by_name):
        output = namespace["run"](*draw(problem).values())
        output = output if isinstance(output, torch.Tensor) else output[0]
        assert output.isfinite().all()
        results.append(output.double())
    assert not torch.equal(*results)


@pytest.mark.parametrize(
    ("problem_id", "name", "by_generator", "by_name"),
    [
        ("L2/015", "conv2d2_weight", (2 / (16 * 9)) ** 0.5, 3**-0.5),
        ("L2/033", "bottleneck_weight", None, 3**-0.5),
        ("L2/057", "transform_0_conv1_weight", None, 5**-0.5),
    ],
)
def test_scales_are_those_of_the_source(problem_id, name, by_generator, by_name):
    problem = load(problem_id, profile="smoke")
    values = draw(problem)[name].float()
    fan_in = values[0].numel()
    assert values.std() == pytest.approx(by_generator or (2 / fan_in) ** 0.5, rel=0.15)
    named = draw(problem.with_recipe(RECIPE))[name].float()
    assert named.std() == pytest.approx(by_name, rel=0.15)


def test_modulation_is_degenerate_by_name_and_not_by_generator():
    problem = load("L2/069", profile="smoke")
    assert draw(problem)["norm1_weight"].unique().numel() > 100
    by_name = draw(problem.with_recipe(RECIPE))
    assert by_name["norm1_weight"].unique().tolist() == [1.0]
    assert not by_name["norm1_bias"].any()


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ProblemError, match=r"no input recipe 'old'; it has published-kinds"):
        load("L2/015").with_recipe("old")
    with pytest.raises(ProblemError, match="it has none"):
        load("L1/069").with_recipe("old")
