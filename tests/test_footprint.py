"""Memory of references: estimated at full size without it, and counted where it is real."""

import json
from pathlib import Path

import pytest
import torch

import sol_gym.problems
from sol_gym.footprint import LiveBytes, reference_peak_bytes
from sol_gym.inputs import InputMaker
from sol_gym.problem import AxisVar, CustomInput, Definition, Problem, TensorSpec, Workload
from sol_gym.problems import list_ids, load, needed_bytes


def test_what_is_freed_no_longer_counts():
    with LiveBytes() as live:
        a = torch.ones(1000)
        for _ in range(5):
            a = a + 1  # the old and the new one are alive together
        view = a[:10].view(2, 5)
        a.mul_(2)
        del view
    assert live.peak == 2 * 4000


def test_tensors_from_outside_and_views_do_not_count():
    x = torch.ones(1000)
    with LiveBytes() as live:
        x.view(10, 100)[2:4].transpose(0, 1)
        x += 1
    assert live.peak == 0


DETERMINATE = ["L1/069", "L1/015", "L1/007", "L1/018", "L2/004", "L2/036", "L2/043", "Quant/029", "FIB/003"]  # fmt: skip


@pytest.mark.parametrize("problem_id", DETERMINATE)
def test_the_estimate_is_what_a_real_run_takes(problem_id):
    problem = load(problem_id, profile="smoke")
    namespace = {"__name__": "reference"}
    exec(problem.reference, namespace)
    for workload in problem.workloads:
        inputs = InputMaker(problem, workload, "cpu", seed=0).draw()
        with torch.no_grad(), LiveBytes() as live:
            namespace["run"](*inputs.values())
        estimate = reference_peak_bytes(problem, workload)
        assert estimate == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("problem_id", ["L1/021", "L2/008", "L2/081", "FIB/014"])
def test_where_random_integers_decide_the_estimate_is_near(problem_id):
    problem = load(problem_id, profile="smoke")
    namespace = {"__name__": "reference"}
    exec(problem.reference, namespace)
    estimated = counted = 0
    for workload in problem.workloads:
        inputs = InputMaker(problem, workload, "cpu", seed=0).draw()
        with torch.no_grad(), LiveBytes() as live:
            namespace["run"](*inputs.values())
        counted += live.peak
        estimated += reference_peak_bytes(problem, workload)
    assert counted / 3 < estimated < 3 * counted


def big(reference, axis):
    spec = TensorSpec(shape=["n", "n"], dtype="float32")
    return Problem(
        id="big",
        definition=Definition(
            name="big",
            axes={"n": AxisVar()},
            inputs={"x": spec},
            outputs={"y": spec},
            custom_inputs_entrypoint="generate_inputs",
            reference=reference,
        ),
        workloads=(Workload(uuid="0", axes={"n": axis}, inputs={"x": CustomInput()}),),
    )


def test_sizes_beyond_any_machine_cost_nothing():
    n = 1 << 20  # 4 TiB a tensor
    problem = big("def run(x):\n    return (x @ x).relu() + 1\n", n)
    # The product is let go once the activation is there, and that once the sum is.
    assert reference_peak_bytes(problem, problem.workloads[0]) == 2 * 4 * n * n


def test_masks_beyond_any_machine_cost_nothing():
    source = (
        "import torch\ndef run(x):\n    i = torch.arange(len(x))\n    return x * (i > i[:, None])"
    )
    problem = big(source, 5000)
    assert reference_peak_bytes(problem, problem.workloads[0]) >= 5 * 5000 * 5000


def test_counts_of_unknown_integers_are_even_and_complete():
    source = (
        "import torch\ndef run(x):\n    rows = x.argmax(-1, keepdim=True).expand(x.shape)\n"
        "    parts = torch.bincount(rows.flatten(), minlength=7).tolist()\n"
        "    return torch.cat(x.flatten().split(parts)).view(x.shape)"
    )
    problem = big(source, 5000)
    assert reference_peak_bytes(problem, problem.workloads[0]) >= 4 * 5000 * 5000


def test_the_random_state_is_as_before():
    problem = load("L2/008", profile="smoke")
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    reference_peak_bytes(problem, problem.workloads[0])
    assert torch.equal(torch.rand(3), expected)


def test_the_librarys_figures_fit_its_problems():
    file = Path(sol_gym.problems.__file__).parent / "memory.json"
    rows = json.loads(file.read_text())["problems"]
    assert set(rows) <= set(list_ids())
    for problem_id, peaks in rows.items():
        problem = load(problem_id)
        assert len(peaks) == len(problem.workloads)
        for workload, peak in zip(problem.workloads, peaks, strict=True):
            outputs = sum(t.nbytes for t in problem.outputs(workload).values())
            inputs = sum(t.nbytes for t in problem.tensors(workload).values())
            # Outputs that are expanded views take less than their shape says.
            assert peak is None or problem_id.startswith("Quant/023") or peak >= outputs
            assert needed_bytes(problem_id)[problem.workloads.index(workload)] >= inputs + outputs


@pytest.mark.parametrize("problem_id", ["L1/069_rms_norm", "FIB/026_rmsnorm_h7168"])
def test_the_librarys_figures_come_from_the_tool(problem_id):
    problem = load(problem_id)
    peaks = sol_gym.problems.reference_peak_bytes(problem_id)
    assert peaks == [reference_peak_bytes(problem, w) for w in problem.workloads]
