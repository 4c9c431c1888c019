# gymnasium's type hints know spaces of arrays only.
# mypy: disable-error-code="arg-type,index,call-overload"
from __future__ import annotations

import copy
import json
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
    read_from_shared_memory,
    write_to_shared_memory,
)

from sol_gym.envs import Utf8

TEXTS = ["", "def run(x):\n\treturn x\n", "naïve – 核 🚀", "a\0b", "\U0010ffff" * 50]


class Echo(gymnasium.Env):
    """Observes the last action, so that a batch shows which texts arrived where."""

    def __init__(self, max_length: int = 200) -> None:
        self.action_space = Utf8(max_length)
        self.observation_space = spaces.Dict(
            {"text": Utf8(max_length), "length": spaces.Box(0, max_length, (1,), np.int64)}
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe("start"), {}

    def step(self, action):
        return self._observe(action), 0.0, False, False, {}

    def _observe(self, text):
        return {"text": text, "length": np.array([len(text)], dtype=np.int64)}


@pytest.mark.parametrize("text", TEXTS)
def test_any_encodable_text_within_the_length_is_a_member(text):
    assert text in Utf8(50)


@pytest.mark.parametrize("other", ["x" * 51, "\ud800", 3, None, b"bytes", ["x"]])
def test_too_long_unencodable_or_not_a_text_is_no_member(other):
    assert other not in Utf8(50)


@pytest.mark.parametrize("max_length", [0, -1, 2.5, "9", True])
def test_a_length_that_is_no_positive_integer_is_refused(max_length):
    with pytest.raises(ValueError, match="expected an integer above 0"):
        Utf8(max_length)


def test_samples_are_members_seeded_and_reach_beyond_ascii():
    space = Utf8(1000, seed=7)
    samples = [space.sample() for _ in range(50)]
    assert all(text in space for text in samples)
    assert any(not text.isascii() for text in samples)
    again = Utf8(1000)
    again.seed(7)
    assert [again.sample() for _ in range(50)] == samples
    assert all(len(Utf8(2).sample()) <= 2 for _ in range(20))


def test_sampling_with_a_mask_says_why_not():
    with pytest.raises(ValueError, match="neither mask nor probability"):
        Utf8(5).sample(mask=(3, None))
    with pytest.raises(ValueError, match="neither mask nor probability"):
        Utf8(5).sample(probability=(3, None))


def test_equality_is_by_length():
    assert Utf8(5) == Utf8(5)
    assert Utf8(5) != Utf8(6)
    assert Utf8(5) != spaces.Text(5)
    assert repr(Utf8(5)) == "Utf8(5)"


def test_space_survives_pickling_and_goes_on_with_the_same_samples():
    space = Utf8(40, seed=1)
    twin = pickle.loads(pickle.dumps(space))
    assert twin == space
    assert twin.sample() == space.sample()


def test_jsonable_round_trip():
    space = Utf8(100)
    data = json.loads(json.dumps(space.to_jsonable(TEXTS)))
    assert space.from_jsonable(data) == TEXTS


def test_fit_leaves_members_alone():
    assert [Utf8(100).fit(text) for text in TEXTS] == TEXTS


def test_fit_escapes_lone_surrogates():
    assert Utf8(100).fit("a\ud800b") == "a\\ud800b"


@pytest.mark.parametrize("max_length", [1, 5, 43, 44, 60, 200])
def test_fit_makes_a_member_of_a_text_that_is_too_long(max_length):
    text = "".join(chr(0x4E00 + i) for i in range(1000))
    fitted = Utf8(max_length).fit(text)
    assert fitted in Utf8(max_length)
    assert fitted[0] == text[0]


def test_fit_keeps_beginning_and_end_and_counts_what_is_missing():
    text = "begin" + "x" * 1000 + "end"
    fitted = Utf8(100).fit(text)
    head, _, tail = fitted.partition("\n[... ")
    count, _, tail = tail.partition(" characters left out ...]\n")
    assert text.startswith(head) and text.endswith(tail)
    assert head.startswith("begin") and tail.endswith("end")
    assert len(head) + len(tail) + int(count) == len(text)


def test_flattening_keeps_the_text_and_needs_no_box():
    space = spaces.Dict({"text": Utf8(9), "turn": spaces.Box(0, 3, (1,), np.float32)})
    value = {"text": "核 x", "turn": np.ones(1, np.float32)}
    flat = flatten(space, value)
    assert flat["text"] == "核 x"
    assert flat in flatten_space(space)
    assert unflatten(space, flat)["text"] == "核 x"
    with pytest.raises(ValueError, match="cannot be flattened"):
        flatdim(space)


def test_a_batch_is_a_tuple_of_texts():
    space = Utf8(20, seed=3)
    batched = batch_space(space, 3)
    assert batched == spaces.Tuple([Utf8(20)] * 3)
    assert create_empty_array(space, n=3) in batched
    items = ["a", "核", "long text"]
    assert concatenate(space, items, create_empty_array(space, n=3)) == tuple(items)
    assert list(iterate(batched, tuple(items))) == items
    assert batch_differing_spaces([Utf8(3), Utf8(5)]) == spaces.Tuple([Utf8(3), Utf8(5)])


def test_shared_memory_shows_what_was_written_last():
    space = Utf8(50)
    memory = create_shared_memory(space, n=len(TEXTS))
    view = read_from_shared_memory(space, memory, n=len(TEXTS))
    assert tuple(view) == ("",) * len(TEXTS)
    for i, text in enumerate(TEXTS):
        write_to_shared_memory(space, i, text, memory)
    assert tuple(view) == tuple(TEXTS)
    write_to_shared_memory(space, 2, "short", memory)
    assert view[2] == "short"
    assert view[1:3] == (TEXTS[1], "short")


def test_a_copy_of_shared_texts_is_a_plain_tuple_that_stays():
    space = Utf8(10)
    memory = create_shared_memory(space, n=2)
    view = read_from_shared_memory(space, memory, n=2)
    write_to_shared_memory(space, 0, "before", memory)
    copies = [copy.deepcopy(view), copy.copy(view), pickle.loads(pickle.dumps(view))]
    write_to_shared_memory(space, 0, "after", memory)
    assert all(type(c) is tuple and c == ("before", "") for c in copies)
    assert view == ("after", "")


def test_writing_a_text_that_is_too_long_to_shared_memory_says_so():
    space = Utf8(4)
    memory = create_shared_memory(space, n=1)
    with pytest.raises(ValueError, match=r"not in Utf8\(4\): found 5 characters"):
        write_to_shared_memory(space, 0, "12345", memory)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_async_vector_env_with_default_arguments_carries_texts_both_ways(context):
    envs = AsyncVectorEnv([Echo, Echo], context=context)
    try:
        first, _ = envs.reset(seed=0)
        assert first["text"] == ("start", "start")
        assert first in envs.observation_space
        second, *_ = envs.step(("naïve 核", "🚀" * 200))
        assert second["text"] == ("naïve 核", "🚀" * 200)
        assert second["length"].tolist() == [[len("naïve 核")], [200]]
        assert first["text"] == ("start", "start")
        envs.step(envs.action_space.sample())
    finally:
        envs.close()


def test_async_vector_env_without_shared_memory_or_copies():
    for kwargs in ({"shared_memory": False}, {"copy": False}):
        envs = AsyncVectorEnv([Echo, Echo], **kwargs)
        try:
            envs.reset()
            observation, *_ = envs.step(("a", "b"))
            assert tuple(observation["text"]) == ("a", "b")
        finally:
            envs.close()


@pytest.mark.parametrize("mode", ["same", "different"])
def test_sync_vector_env_carries_texts_both_ways(mode):
    envs = SyncVectorEnv([Echo, Echo], observation_mode=mode)
    envs.reset()
    observation, *_ = envs.step(("a", "核"))
    assert observation["text"] == ("a", "核")
    assert observation in envs.observation_space
    envs.close()


def test_vector_env_refuses_texts_of_different_length():
    with pytest.raises((RuntimeError, AssertionError)):  # AssertionError before gymnasium 1.1
        SyncVectorEnv([Echo, lambda: Echo(300)])
