"""Following inputs to outputs through a run."""

import pytest
import torch

from sol_gym.influence import InputTracker


@pytest.fixture
def tensors():
    return {name: torch.arange(6.0).view(2, 3) + i for i, name in enumerate("abcd")}


def follow(tensors, run):
    tracker = InputTracker(tensors)
    with tracker:
        result = run(**tensors)
    return tracker.names(result)


def test_operands_and_nothing_else(tensors):
    assert follow(tensors, lambda a, b, c, d: (a + b).sum()) == {"a", "b"}


def test_a_result_that_is_thrown_away_has_no_influence(tensors):
    def run(a, b, c, d):
        (c @ d.T).softmax(-1)
        return a * 2

    assert follow(tensors, run) == {"a"}


def test_writes_in_place_and_through_views(tensors):
    def run(a, b, c, d):
        out = torch.zeros(4, 3)
        out[:2].copy_(a)
        out[2:, 0] = b[:, 0]
        return out[3]  # a view of memory that holds both

    assert follow(tensors, run) == {"a", "b"}


def test_shapes_are_not_content(tensors):
    assert follow(tensors, lambda a, b, c, d: torch.zeros_like(a) + b.new_ones(3) + len(c)) == set()


def test_indices_and_masks_count(tensors):
    assert follow(tensors, lambda a, b, c, d: a[b > 2]) == {"a", "b"}
    assert follow(tensors, lambda a, b, c, d: a.gather(0, (c > 4).long())) == {"a", "c"}


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist()[0][0] > 0,
        lambda t: t[0, 0].item() > 0,
        lambda t: t.numpy().any(),
        lambda t: bool(t.any()),
        lambda t: torch.equal(t, t),
    ],
)
def test_what_python_reads_steers_everything(tensors, read):
    assert follow(tensors, lambda a, b, c, d: a + 1 if read(d) else a) == {"a", "d"}


def test_memory_used_again_has_no_memory(tensors):
    def run(a, b, c, d):
        for _ in range(20):
            freed = b * 2
            del freed
            fresh = torch.ones(2, 3) * 1
        return fresh + a

    assert follow(tensors, run) == {"a"}


def test_tensors_in_the_same_memory_share_their_influence():
    base = torch.zeros(4)
    tracker = InputTracker({"whole": base, "half": base[:2]})
    with tracker:
        result = base * 1
    assert tracker.names(result) == {"whole", "half"}
