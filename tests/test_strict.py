"""Strict inputs: what a variant changes, what it must not change, and what a pack can say."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from sol_gym.errors import ProblemError
from sol_gym.inputs import InputMaker
from sol_gym.problem import Pack, Problem
from sol_gym.strict import VARIANTS, harden, other_shape, variants_for

REFERENCE = "def run(*inputs):\n    return inputs[0]\n"
ROWS, WIDTH = 24, 64


def problem(dtype="float32", rules=None, variants=None, family="norm", **inputs) -> Problem:
    """A problem whose inputs are [rows, width] (or as given) and drawn by their names."""
    specs = {
        name: shape if isinstance(shape, dict) else {"shape": shape, "dtype": dtype}
        for name, shape in inputs.items()
    }
    kinds = {
        name: {"type": "scalar", "value": 1.0} if spec["shape"] is None else {"type": "random"}
        for name, spec in specs.items()
    }
    return Problem.model_validate(
        {
            "id": "L1/000_strict",
            "definition": {
                "name": "strict",
                "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": WIDTH}},
                "inputs": specs,
                "outputs": {"y": {"shape": ["rows", "width"], "dtype": dtype}},
                "reference": REFERENCE,
            },
            "workloads": [{"uuid": "w0", "axes": {"rows": ROWS}, "inputs": kinds}],
            "pack": {
                "id": "L1/000_strict", "title": "", "family": family, "strict_rules": rules or {},
                "strict_variants": variants,
            },
        }
    )  # fmt: skip


def drawn(variant="plain", seed=3, **arguments):
    p = problem(**arguments)
    return InputMaker(p, p.workloads[0], "cpu", seed=seed, profile="strict").draw(variant)


def hardened(values, variant="plain", rules=None, **shapes):
    """Values given by hand, hardened as the inputs of a problem."""
    specs = {
        name: {"shape": [str(n) for n in value.shape], "dtype": str(value.dtype)[6:]}
        for name, value in values.items()
    }
    p = problem(rules=rules, **specs)
    generator = torch.Generator().manual_seed(5)
    return harden(values, p, p.workloads[0], variant, generator)


def test_norm_weights_are_not_ones_and_biases_not_zeros():
    values = drawn(x=["rows", "width"], norm_weight=["width"], norm_bias=["width"])
    assert values["norm_weight"].unique().numel() > WIDTH // 2
    assert (values["norm_weight"] < 0).any() and values["norm_weight"].abs().min() >= 0.25
    assert values["norm_bias"].abs().mean() > 0.1


def test_rows_differ_in_scale_columns_have_means_and_outliers():
    x = drawn("rows", x=["rows", "width"])["x"]
    size = x.square().mean(-1).sqrt()
    assert size.max() / size.min() > 16
    # Row scales are powers of two: without them the columns' means are seen.
    flat = x / size.unsqueeze(-1)
    assert flat.mean(0).abs().max() > 4 * flat.std(0).median() / math.sqrt(ROWS)
    columns = flat.square().mean(0).sqrt()
    assert columns.max() / columns.median() > 3


def test_tiny_and_huge_go_where_epsilons_and_float16_end():
    assert drawn("tiny", x=["rows", "width"])["x"].square().mean() < 1e-4
    huge = drawn("huge", x=["rows", "width"], dtype="bfloat16")["x"].float()
    assert huge.abs().max() > 65504
    assert (huge.mean(-1) > 0.4 * huge.std(-1)).float().mean() > 0.9, "rows have a mean"


def test_float16_stays_finite():
    for variant in VARIANTS:
        assert torch.isfinite(drawn(variant, x=["rows", "width"], dtype="float16")["x"]).all()


def test_a_causal_mask_stays_causal_and_every_row_sees_itself():
    mask = drawn(attention_mask=["width", "width"])["attention_mask"]
    lowest = torch.finfo(torch.float32).min
    assert (mask[torch.ones(WIDTH, WIDTH).triu(1).bool()] == lowest).all()
    assert (mask.diagonal() > -2).all()
    below = mask[torch.ones(WIDTH, WIDTH).tril(-1).bool()]
    assert 0.1 < (below == lowest).double().mean() < 0.3
    assert ((below < 0) & (below > -1.01)).any()


def test_what_is_positive_or_a_probability_stays_so():
    values = hardened({"rstd": torch.rand(8, 9) + 1, "scores": torch.rand(8, 9)}, "rows")
    assert (values["rstd"] > 0).all()
    assert ((values["scores"] >= 0) & (values["scores"] <= 1)).all()


def test_binary_masks_stay_binary_with_other_shares_in_each_row():
    values = hardened({"padding_mask": torch.ones(64, 50), "keep_mask": torch.ones(64, 50).bool()})
    for mask in values.values():
        assert set(mask.float().unique().tolist()) == {0.0, 1.0}
        share = mask.float().mean(-1)
        assert share.min() < 0.4 and share.max() > 0.8


def test_cosines_stay_cosines_whose_halves_differ():
    cos = hardened({"cos": torch.rand(6, 32)}, "rows")["cos"]
    assert cos.abs().max() <= 1 and not torch.equal(cos[:, :16], cos[:, 16:])


def test_indices_are_left_alone_unless_a_rule_says_otherwise():
    index = torch.arange(20)
    assert torch.equal(hardened({"token_indices": index.clone()})["token_indices"], index)


def test_factors_change_and_other_numbers_do_not():
    values = drawn(x=["rows", "width"], scale={"shape": None, "dtype": "float32"},
                   eps={"shape": None, "dtype": "float32"})  # fmt: skip
    assert values["scale"] != 1.0 and 0.5 <= values["scale"] <= 1.5
    assert values["eps"] == 1.0


def test_float8_has_other_scales_and_no_nan():
    x = torch.randn(64, 32).clamp(-2, 2).to(torch.float8_e4m3fn)
    after = hardened({"x": x.clone()})["x"].float()
    assert torch.isfinite(after).all() and after.abs().max() > 4


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ({"kind": "distinct", "size": 40}, lambda t: all(len(set(r)) == 5 and max(r) < 40 for r in t.tolist())),
        ({"kind": "skewed", "size": 40}, lambda t: (t < 10).double().mean() > 0.35 and t.max() < 40),
        ({"kind": "integers", "low": 7, "high": "rows"}, lambda t: t.min() >= 7 and t.max() < ROWS),
        ({"kind": "choice", "values": [3, 9]}, lambda t: set(t.unique().tolist()) == {3, 9}),
        ({"kind": "shuffle", "axis": 0}, lambda t: sorted(t[:, 0].tolist()) == list(range(30))),
        ({"kind": "keep"}, lambda t: torch.equal(t[:, 0], torch.arange(30))),
    ],
)  # fmt: skip
def test_rules_of_a_pack_for_indices(rule, holds):
    index = torch.arange(30).unsqueeze(1).expand(30, 5).contiguous()
    assert holds(hardened({"index": index}, rules={"index": rule})["index"])


def test_lengths_keep_their_total_and_some_pieces_are_empty():
    ends = torch.arange(0, 101, 10)
    after = hardened({"ends": ends.clone()}, rules={"ends": {"kind": "lengths"}})["ends"]
    assert after[0] == 0 and after[-1] == 100 and (after.diff() >= 0).all()
    assert after.diff().max() > 20
    rule = {"kind": "lengths", "least": 1, "leading_zero": False}
    after = hardened({"ends": ends[1:].clone()}, rules={"ends": rule})["ends"]
    assert after[0] >= 1 and after[-1] == 100 and (after.diff() >= 1).all()


def test_a_rule_may_be_for_some_variants_alone():
    rules = {"index": {"kind": "choice", "values": [5], "variants": ["rows"]}}
    index = torch.arange(4)
    assert (hardened({"index": index.clone()}, "rows", rules)["index"] == 5).all()
    assert torch.equal(hardened({"index": index.clone()}, "plain", rules)["index"], index)


def test_errors_say_what_there_is():
    with pytest.raises(ProblemError, match="no strict variant 'wild'; there are"):
        drawn("wild", x=["rows", "width"])
    with pytest.raises(ProblemError, match=r"strict_variants has unknown \['wild'\]"):
        variants_for(problem(variants=["wild"], x=["rows", "width"]))
    with pytest.raises(ProblemError, match="no axis 'heads'; there are"):
        index = torch.arange(4)
        hardened({"i": index}, rules={"i": {"kind": "integers", "high": "heads"}})
    with pytest.raises(ProblemError, match="'shuffle' does not fit input 'eps', a Python number"):
        drawn(x=["rows", "width"], eps={"shape": None, "dtype": "float32"},
              rules={"eps": {"kind": "shuffle"}})  # fmt: skip


def test_an_unknown_kind_of_rule_is_refused_by_the_schema():
    with pytest.raises(ValueError, match="strict_rules"):
        Pack.model_validate({"id": "x", "title": "", "strict_rules": {"a": {"kind": "magic"}}})


def test_a_fill_hardens_the_sets_it_is_told_to_and_leaves_the_others():
    p = problem(
        x=["rows", "width"], norm_weight=["width"], scale={"shape": None, "dtype": "float32"}
    )
    maker = InputMaker(p, p.workloads[0], "cpu", seed=1, profile="strict")
    views = {"x": torch.empty(3, ROWS, WIDTH), "norm_weight": torch.empty(3, WIDTH)}
    scalars = maker.fill(views, 3, [None, "plain"])
    ones = torch.ones(WIDTH)
    assert torch.equal(views["norm_weight"][0], ones) and torch.equal(views["norm_weight"][2], ones)
    assert not torch.equal(views["norm_weight"][1], ones)
    assert [row["scale"] == 1.0 for row in scalars] == [True, False, True]
    assert maker.given == {"scale": 1.0}


def test_strict_sets_are_repeatable_by_seed():
    first, again, other = (drawn("rows", seed=s, x=["rows", "width"])["x"] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_compatible_profile_has_no_variants():
    p = problem(x=["rows", "width"])
    assert InputMaker(p, p.workloads[0], "cpu").variants == ()
    assert InputMaker(p, p.workloads[0], "cpu", profile="strict").variants == tuple(VARIANTS)


def test_another_shape_has_one_free_axis_at_an_odd_size_that_is_not_listed():
    p = problem(x=["rows", "width"])
    assert other_shape(p, Random(1)) is None
    p = p.model_copy(update={"pack": p.pack.model_copy(update={"free_axes": ["rows"]})})
    sizes = set()
    for seed in range(20):
        workload, source = other_shape(p, Random(seed))
        assert source == 0 and workload.uuid != p.workloads[0].uuid
        sizes.add(workload.axes["rows"])
    assert len(sizes) > 2 and all(ROWS // 2 <= n < ROWS and n % 2 for n in sizes)


def test_another_shape_is_sought_at_a_larger_workload_where_the_smallest_leaves_no_choice():
    p = problem(x=["rows", "width"])
    free = p.pack.model_copy(update={"free_axes": ["rows"]})
    sizes = (1, 64, 2, 6)
    workloads = tuple(
        p.workloads[0].model_copy(update={"uuid": f"w{n}", "axes": {"rows": n}}) for n in sizes
    )
    p = p.model_copy(update={"pack": free, "workloads": workloads})
    found = [other_shape(p, Random(seed)) for seed in range(10)]
    assert {source for _, source in found} == {1}
    assert len({workload.axes["rows"] for workload, _ in found}) > 2
    few = p.model_copy(update={"workloads": (workloads[0], workloads[3])})
    workload, source = other_shape(few, Random(1))
    assert (workload.axes["rows"], source) in ((3, 1), (5, 1))
    assert other_shape(p.model_copy(update={"workloads": workloads[:1]}), Random(1)) is None
