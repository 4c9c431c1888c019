"""Regions against boolean arrays: every operation, on random regions of random small shapes."""

from __future__ import annotations

import numpy as np
import pytest

from sol_gym.solar import region as region_module
from sol_gym.solar.region import Region

ROUNDS = 250


@pytest.fixture(params=["few terms", "bits at once"], autouse=True)
def representation(request, monkeypatch):
    """Small regions are kept as bits; both ways have to be right."""
    monkeypatch.setattr(region_module, "_FEW_TERMS", 8 if request.param == "few terms" else 1)


def random_region(rng: np.random.Generator, shape: tuple[int, ...]) -> Region:
    result = Region.empty(shape)
    for _ in range(rng.integers(1, 4)):
        axes = {d: rng.random(n) < 0.6 for d, n in enumerate(shape) if rng.random() < 0.6}
        part = Region.product(shape, axes)
        if len(shape) > 1 and rng.random() < 0.5:
            row, col = (int(d) for d in rng.permutation(len(shape))[:2])
            low, high = (rng.integers(0, shape[col] + 1, shape[row]) for _ in range(2))
            if rng.random() < 0.7:
                low.sort()
                high.sort()
            part = part.intersect(Region.of_band(shape, row=row, col=col, low=low, high=high))
        result = result.union(part)
    return result


def cases(seed: int):
    """Random (generator, shape, region, the region as an array), exact ones only."""
    rng = np.random.default_rng(seed)
    for _ in range(ROUNDS):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
        region = random_region(rng, shape)
        if region.exact:
            yield rng, shape, region, region.mask()


def check(got: Region, want: np.ndarray) -> None:
    """Equal where exact, else a subset; and terms do not overlap."""
    mask = got.mask()
    assert mask is not None and mask.shape == want.shape
    assert got.count() == mask.sum()
    assert not (mask & ~want).any()
    if got.exact:
        assert (mask == want).all()


def test_sets_are_like_boolean_arrays():
    for rng, shape, a, mask in cases(0):
        b = random_region(rng, shape)
        if b.exact:
            check(a.intersect(b), mask & b.mask())
            check(a.union(b), mask | b.mask())
            check(a.subtract(b), mask & ~b.mask())


def test_axes_can_be_permuted_projected_cut_and_placed():
    for rng, shape, a, mask in cases(1):
        order = [int(d) for d in rng.permutation(len(shape))]
        check(a.permute(order), mask.transpose(order))
        dim = int(rng.integers(len(shape)))
        check(a.any_over([dim]), mask.any(dim))
        check(a.any_over([dim], keep=True), mask.any(dim, keepdims=True))
        start, step = int(rng.integers(0, shape[dim] + 1)), int(rng.integers(1, 3))
        cut = [slice(None)] * len(shape)
        cut[dim] = slice(start, shape[dim], step)
        check(a.slice(dim, start, shape[dim], step), mask[tuple(cut)])
        size = start + (shape[dim] - 1) * step + 2
        larger = np.zeros([size if d == dim else n for d, n in enumerate(shape)], dtype=bool)
        cut[dim] = slice(start, size - 1, step)
        larger[tuple(cut)] = mask
        check(a.unslice(dim, size, start, step), larger)


def test_rows_can_be_taken_and_given_back():
    for rng, shape, a, mask in cases(2):
        dim = int(rng.integers(len(shape)))
        index = rng.integers(0, shape[dim], 4)
        check(a.take(dim, index), mask.take(index, dim))
        size = 6
        places = rng.integers(0, size, shape[dim])
        given = np.zeros([size if d == dim else n for d, n in enumerate(shape)], dtype=bool)
        np.logical_or.at(given, (*[slice(None)] * dim, places), mask)
        check(a.untake(dim, size, places), given)


def test_reshape_keeps_the_elements():
    for rng, _, a, mask in cases(3):
        left, sizes = mask.size, []
        while left > 1 and rng.random() < 0.8:
            factor = int(rng.choice([n for n in range(1, left + 1) if left % n == 0]))
            sizes.append(factor)
            left //= factor
        check(a.reshape([*sizes, left]), mask.reshape([*sizes, left]))


def test_broadcast_and_back():
    for rng, shape, a, mask in cases(4):
        larger = tuple(int(rng.integers(2, 4)) if n == 1 else n for n in shape)
        larger = (2,) * int(rng.integers(0, 2)) + larger
        check(a.broadcast(larger), np.broadcast_to(mask, larger))
        b = random_region(rng, larger)
        if b.exact:
            lead = len(larger) - len(shape)
            want = b.mask().any(axis=tuple(range(lead)))
            for d, n in enumerate(shape):
                if n == 1:
                    want = want.any(axis=d, keepdims=True)
            check(b.unbroadcast(shape), want)


def test_a_mask_becomes_the_region_of_its_true_elements():
    for _, _, _, mask in cases(5):
        region = Region.of_mask(mask)
        assert region.exact
        check(region, mask)


def test_a_causal_mask_of_any_size_is_a_band():
    n = 2**17
    lower = Region.of_band((8, n, n), row=1, col=2, low=np.zeros(n), high=np.arange(n) + 1)
    assert lower.count() == 8 * n * (n + 1) // 2
    assert lower.reshape((2, 4, n, n)).permute((0, 1, 3, 2)).count() == lower.count()
    upper = Region.full((8, n, n)).subtract(lower)
    assert upper.exact and upper.count() == 8 * n * (n - 1) // 2
    assert upper.union(lower).is_full
