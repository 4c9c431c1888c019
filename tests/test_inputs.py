"""Making input sets: repeatable, different, with custom and recorded inputs and typed errors."""

import pytest
import torch

from sol_gym.draws import torch_dtype
from sol_gym.errors import ProblemError
from sol_gym.inputs import InputMaker, register_profile
from sol_gym.problem import Problem

REFERENCE = """
import torch

def run(x, table, flag, scale, eps):
    return x

def generate_inputs(axes_and_scalars, device):
    rows = axes_and_scalars["rows"]
    return {
        "table": torch.randint(0, rows, (rows, axes_and_scalars["half"]), device=device),
        "flag": bool(torch.rand((), device=device) < 0.5),
        "scale": torch.rand(()).item() + axes_and_scalars["eps"],
    }
"""


def make_problem(reference=REFERENCE, root=None, **inputs):
    specs = {
        "x": {"shape": ["rows", "width"], "dtype": "bfloat16"},
        "table": {"shape": ["rows", "half"], "dtype": "int64"},
        "flag": {"shape": None, "dtype": "bool"},
        "scale": {"shape": None, "dtype": "float32"},
        "eps": {"shape": None, "dtype": "float32"},
    }
    kinds = {
        "x": {"type": "random"},
        "table": {"type": "custom"},
        "flag": {"type": "custom"},
        "scale": {"type": "custom"},
        "eps": {"type": "scalar", "value": 1},
    } | inputs
    return Problem.model_validate(
        {
            "id": "L1/000_mixed",
            "root": root,
            "definition": {
                "name": "mixed",
                "axes": {
                    "rows": {"type": "var"},
                    "width": {"type": "const", "value": 8},
                    "half": {"type": "expr", "expression": "width // 2"},
                },
                "inputs": specs,
                "outputs": {"y": {"shape": ["rows", "width"], "dtype": "bfloat16"}},
                "custom_inputs_entrypoint": "generate_inputs",
                "reference": reference,
            },
            "workloads": [{"uuid": "w0", "axes": {"rows": 50}, "inputs": kinds}],
        }
    )


def make_maker(problem=None, **options):
    problem = problem or make_problem()
    return InputMaker(problem, problem.workloads[0], "cpu", **options)


def same(a, b):
    return all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


def test_a_set_comes_in_call_order_with_declared_types():
    values = make_maker(seed=0).draw()
    assert list(values) == ["x", "table", "flag", "scale", "eps"]
    assert values["x"].shape == (50, 8) and values["x"].dtype == torch.bfloat16
    assert values["table"].shape == (50, 4) and values["table"].dtype == torch.int64
    assert type(values["flag"]) is bool
    assert 1.0 <= values["scale"] < 2.0
    assert type(values["eps"]) is float


def test_a_seed_repeats_the_sequence_of_sets():
    first, second = make_maker(seed=3), make_maker(seed=3)
    a = [first.draw() for _ in range(3)]
    assert all(same(x, second.draw()) for x in a)
    assert not same(a[0], a[1])
    assert not torch.equal(a[0]["table"], a[1]["table"])
    assert not same(a[0], make_maker(seed=4).draw())


def test_without_a_seed_no_two_makers_agree():
    assert not same(make_maker().draw(), make_maker().draw())


def test_global_random_state_is_left_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_maker(seed=0).draw()
    assert torch.equal(torch.rand(3), expected)


def test_the_global_seed_does_not_matter():
    torch.manual_seed(1)
    a = make_maker(seed=0).draw()
    torch.manual_seed(2)
    assert same(a, make_maker(seed=0).draw())


def test_fill_writes_different_sets_and_returns_their_scalars():
    arena = {"x": torch.zeros(5, 50, 8, dtype=torch.bfloat16), "table": torch.full((4, 50, 4), -1)}
    scalars = make_maker(seed=0).fill(arena, 3)
    assert [list(s) for s in scalars] == [["flag", "scale", "eps"]] * 3
    assert len({s["scale"] for s in scalars}) == 3
    assert (arena["x"][3:] == 0).all() and (arena["table"][3:] == -1).all()
    for tensor in arena.values():
        assert not torch.equal(tensor[0], tensor[1]) and not torch.equal(tensor[1], tensor[2])
    assert ((arena["table"][:3] >= 0) & (arena["table"][:3] < 50)).all()


def test_the_reference_is_executed_once():
    reference = REFERENCE.replace("import torch\n", "import torch\ncalls = []\n", 1)
    reference = reference.replace("    rows = axes", "    calls.append(1)\n    rows = axes")
    reference = reference.replace(".item() +", ".item() * 0 + len(calls) +")
    maker = make_maker(make_problem(reference), seed=0)
    assert [maker.draw()["scale"] for _ in range(3)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ({}, r"no view for input 'x'; got \['table'\]"),
        (
            {"x": torch.empty(2, 50, 8, dtype=torch.bfloat16)},
            r"\[2, 50, 8\], expected \[at least 3",
        ),
        ({"x": torch.empty(3, 50, 9, dtype=torch.bfloat16)}, r"\[3, 50, 9\], expected"),
        ({"x": torch.empty(3, 50, 8)}, r"dtype torch\.float32, expected torch\.bfloat16"),
    ],
)
def test_a_view_that_does_not_fit_is_named(views, message):
    views = {"table": torch.empty(3, 50, 4, dtype=torch.int64)} | views
    with pytest.raises(ProblemError, match=message):
        make_maker(seed=0).fill(views, 3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"flag":', '"flagg":', r"missing \['flag'\], unknown \['flagg'\]"),
        ('    return {\n', '    return 7\n    return {\n', "returned int, expected a dict"),
        ('["half"]), device', '["rows"]), device', r"'table' has shape \[50, 50\], expected"),
        ("device=device),\n", "device=device).int(),\n", r"has dtype torch\.int32, expected"),
        ('"table": torch', '"table": 3 or torch', "'table' is int, expected a tensor"),
        (".item() +", "+", r"'scale' is Tensor, expected a Python number .*\.item\(\)"),
        ('"flag": bool', '"flag": 7 or bool', "'flag' is 7, expected bool"),
        ('["rows"]\n', '["cols"]\n', "generate_inputs raised KeyError: 'cols'"),
        ("def generate_inputs", "def make_inputs", "no function 'generate_inputs'"),
        ("import torch\n", "import torchh\n", "cannot be executed: ModuleNotFoundError"),
        ("def run(", "def run(:", "cannot be executed: SyntaxError"),
    ],
)  # fmt: skip
def test_a_faulty_generator_is_a_problem_error_that_says_what_is_wrong(old, new, message):
    assert old in REFERENCE
    with pytest.raises(ProblemError, match=rf"L1/000_mixed.*{message}"):
        make_maker(make_problem(REFERENCE.replace(old, new, 1)), seed=0).draw()


def test_a_generator_may_make_inputs_that_the_workload_gets_otherwise():
    maker = make_maker(make_problem(flag={"type": "scalar", "value": True}), seed=0)
    assert maker.draw()["flag"] is True


def test_a_scalar_of_the_wrong_kind_is_refused():
    with pytest.raises(ProblemError, match=r"'flag' is 0\.5, expected bool"):
        make_maker(make_problem(flag={"type": "scalar", "value": 0.5}))


def test_a_reference_is_not_executed_without_custom_inputs():
    table = {"table": {"type": "random"}, "flag": {"type": "scalar", "value": False}}
    problem = make_problem("raise RuntimeError", scale={"type": "scalar", "value": 2}, **table)
    assert make_maker(problem, seed=0).draw()["scale"] == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_sets_are_made_on_the_gpu_in_place():
    problem = make_problem()
    maker = InputMaker(problem, problem.workloads[0], "cuda", seed=3)
    arena = torch.full((4, 8192), 0xAB, dtype=torch.uint8, device="cuda")
    views = {
        "x": arena[:, :800].view(torch.bfloat16).unflatten(1, (50, 8)),
        "table": arena[:, 1024:2624].view(torch.int64).unflatten(1, (50, 4)),
    }
    state = torch.cuda.get_rng_state()
    scalars = maker.fill(views, 3)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert len({s["scale"] for s in scalars}) == 3
    assert (arena[3] == 0xAB).all() and (arena[:, 2624:] == 0xAB).all()
    assert not torch.equal(views["x"][0], views["x"][1])
    assert not torch.equal(views["table"][0], views["table"][1])
    x = maker.draw()["x"]
    assert isinstance(x, torch.Tensor) and x.is_cuda


# ---- Recorded tensors -----------------------------------------------------------------------


def recorded_problem(root=None, key="t"):
    kind = {"type": "safetensors", "path": "blob/table.safetensors", "tensor_key": key}
    problem = make_problem(table=kind)
    return problem.model_copy(update={"root": str(root) if root else None})


@pytest.fixture
def blob(tmp_path):
    from safetensors.torch import save_file

    def write(tensor):
        (tmp_path / "blob").mkdir(exist_ok=True)
        save_file({"t": tensor}, tmp_path / "blob" / "table.safetensors")
        return tmp_path

    return write


def test_a_recorded_tensor_is_read_from_the_blob_root_or_the_folder(blob, tmp_path):
    table = torch.arange(200).reshape(50, 4)
    root = blob(table)
    for maker in (
        make_maker(recorded_problem(), blob_root=root),
        make_maker(recorded_problem(root)),
        make_maker(recorded_problem(root), blob_root=tmp_path / "elsewhere"),
    ):
        values = maker.draw()
        assert torch.equal(values["table"], table)
        values["table"].zero_()
        assert torch.equal(maker.draw()["table"], table)
        views = {
            k: torch.empty(2, *a.shape, dtype=torch_dtype(a.dtype))
            for k, a in maker.tensors.items()
        }
        maker.fill(views, 2)
        assert torch.equal(views["table"], table.expand(2, 50, 4))


def test_a_missing_recorded_file_says_where_it_was_sought(tmp_path):
    with pytest.raises(ProblemError, match=rf"table\.safetensors' not found; looked in {tmp_path}"):
        make_maker(recorded_problem(tmp_path))
    with pytest.raises(ProblemError, match="looked in nowhere"):
        make_maker(recorded_problem())


def test_a_recorded_tensor_that_does_not_fit_is_refused(blob):
    root = blob(torch.zeros(50, 5, dtype=torch.int64))
    with pytest.raises(ProblemError, match=r"'t' has shape \[50, 5\], expected \[50, 4\]"):
        make_maker(recorded_problem(root))
    blob(torch.zeros(50, 4))
    with pytest.raises(ProblemError, match=r"'t' has dtype torch\.float32, expected torch\.int64"):
        make_maker(recorded_problem(root))
    with pytest.raises(ProblemError, match=r"has no tensor 'u'; it has \['t'\]"):
        make_maker(recorded_problem(root, key="u"))
    (root / "blob" / "table.safetensors").write_text("no")
    with pytest.raises(ProblemError, match="is not a safetensors file"):
        make_maker(recorded_problem(root))


# ---- Profiles -------------------------------------------------------------------------------


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ProblemError, match=r"'loose'; there is: .*compatible"):
        make_maker(profile="loose")


def test_a_registered_profile_draws_the_random_inputs(monkeypatch):
    from sol_gym import inputs

    monkeypatch.setattr(inputs, "_PROFILES", dict(inputs._PROFILES))

    def sevens(problem, workload):
        assert workload in problem.workloads
        return lambda out, name, dtype, generator: out.fill_(7)

    register_profile("sevens", sevens)
    assert (make_maker(profile="sevens").draw()["x"] == 7).all()
