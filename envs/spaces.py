"""The text space of sol_gym's environments.

`gymnasium.spaces.Text` enumerates its character set, which rules out source code in any script
and comments in any language, and its strings are read out of shared memory once, when an
`AsyncVectorEnv` is built, so that they never change again. `Utf8` holds any Unicode text up to a
length and works in every vector environment with the default arguments.

Importing this module registers `Utf8` with gymnasium's space functions, which dispatch on the
type of the space. `iterate` is left alone on purpose: gymnasium iterates over a batch of custom
spaces itself, and a registration would make it iterate over the characters.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from ctypes import c_uint8
from typing import Any

import numpy as np
from gymnasium.spaces import Space, Tuple
from gymnasium.spaces.utils import (
    flatdim,
    flatten,
    flatten_space,
    is_space_dtype_shape_equiv,
    unflatten,
)
from gymnasium.vector.utils import (
    batch_differing_spaces,
    create_empty_array,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

__all__ = ["Utf8"]

_SAMPLE_LENGTH = 64
"""Samples stay short: a sample is noise to any consumer, and a long one only costs time."""

_SAMPLE_RANGES = ((0x20, 0x7F), (0x20, 0x7F), (0xA1, 0x530), (0x4E00, 0x9FA6), (0x1F300, 0x1F600))
"""Code points drawn: ASCII twice as often as each of European scripts, CJK and emoji."""


class Utf8(Space[str]):
    """Any Unicode text of at most `max_length` characters.

    Every text that UTF-8 can encode is a member; lone surrogates, which it cannot, are not
    (`fit` makes a member of any text).

    Example:
        >>> from sol_gym.envs import Utf8
        >>> space = Utf8(20)
        >>> "def run(x): …" in space, "x" * 21 in space
        (True, False)
        >>> space
        Utf8(20)
    """

    max_length: int
    """Longest text, in characters (code points, as `len` counts them)."""

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        """A space of texts of 0 to `max_length` characters.

        Raises:
            ValueError: `max_length` is not an integer above 0.
        """
        if isinstance(max_length, bool) or not isinstance(max_length, int | np.integer):
            raise ValueError(f"max_length is {max_length!r}, expected an integer above 0")
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, expected an integer above 0")
        self.max_length = int(max_length)
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: a text has no fixed size, so it flattens to itself."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A short random text of mixed scripts, from the space's own generator.

        Raises:
            ValueError: a mask or a probability is given; Unicode is not a list to choose from.
        """
        if mask is not None or probability is not None:
            raise ValueError(
                "Utf8.sample takes neither mask nor probability, because the space has no list of "
                "characters to weigh; draw without them, or use gymnasium.spaces.Text"
            )
        length = int(self.np_random.integers(0, min(self.max_length, _SAMPLE_LENGTH) + 1))
        ranges = self.np_random.integers(0, len(_SAMPLE_RANGES), size=length)
        return "".join(chr(self.np_random.integers(*_SAMPLE_RANGES[i])) for i in ranges)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text, short enough and without lone surrogates."""
        return isinstance(x, str) and len(x) <= self.max_length and _is_encodable(x)

    def fit(self, text: str) -> str:
        """The nearest member: lone surrogates escaped, a text too long cut in the middle.

        Beginning and end are what one needs of a compiler's output or a traceback, so it is the
        middle that goes, replaced by a note of how much is missing where there is room for one.
        """
        if not _is_encodable(text):
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        if len(text) <= self.max_length:
            return text
        note = "\n[... {} characters left out ...]\n"
        keep = self.max_length - len(note.format(len(text)))
        if keep < 2:
            return text[: self.max_length]
        head, tail = text[: keep - keep // 2], text[len(text) - keep // 2 :]
        return head + note.format(len(text) - keep) + tail

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utf8) and self.max_length == other.max_length

    def __repr__(self) -> str:
        return f"Utf8({self.max_length})"


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ---- Flattening: as for gymnasium's other spaces without a fixed size, the flat form of a Dict
# that holds a text is a Dict.


@flatten.register(Utf8)
def _flatten(space: Utf8, x: str) -> Any:  # type: ignore[misc]
    return x


@unflatten.register(Utf8)
def _unflatten(space: Utf8, x: Any) -> str:  # type: ignore[misc]
    return x


@flatten_space.register(Utf8)
def _flatten_space(space: Utf8) -> Any:
    return space


@flatdim.register(Utf8)
def _flatdim(space: Utf8) -> int:
    raise ValueError(f"{space} has no fixed size, so it cannot be flattened to a numpy array")


@is_space_dtype_shape_equiv.register(Utf8)
def _is_equivalent(space: Utf8, other: Space) -> bool:
    return space == other


# ---- Vector environments: a batch of texts is a tuple of texts.


@batch_differing_spaces.register(Utf8)
def _batch_differing(spaces: Sequence[Utf8]) -> Tuple:  # type: ignore[misc]
    return Tuple([deepcopy(space) for space in spaces], seed=deepcopy(spaces[0].np_random))


@create_empty_array.register(Utf8)
def _create_empty(space: Utf8, n: int = 1, fn: Callable = np.zeros) -> tuple[str, ...]:
    return ("",) * n


# ---- Shared memory of AsyncVectorEnv: for each environment a slot of eight bytes for the length
# (in bytes) and room for the longest text.

_HEADER = 8
_MAX_BYTES_PER_CHARACTER = 4


def _slot_bytes(space: Utf8) -> int:
    return _HEADER + _MAX_BYTES_PER_CHARACTER * space.max_length


class _SharedTexts(Sequence[str]):
    """The texts that are in shared memory now.

    `AsyncVectorEnv` reads its shared memory once and then relies on the arrays being views of it.
    A string cannot be a view, so this stands for the tuple of strings; a copy of it, deep or
    shallow, and a pickle are the plain tuple of that moment.
    """

    def __init__(self, slots: np.ndarray) -> None:
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        slot = self._slots[index]
        length = int(slot[:_HEADER].view(np.int64)[0])
        return slot[_HEADER : _HEADER + length].tobytes().decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


@create_shared_memory.register(Utf8)
def _create_shared(space: Utf8, n: int = 1, ctx: Any = multiprocessing) -> Any:
    return ctx.Array(c_uint8, n * _slot_bytes(space))


@read_from_shared_memory.register(Utf8)
def _read_shared(space: Utf8, shared_memory: Any, n: int = 1) -> Any:
    data = np.frombuffer(shared_memory.get_obj(), dtype=np.uint8)
    return _SharedTexts(data.reshape(n, _slot_bytes(space)))


@write_to_shared_memory.register(Utf8)
def _write_shared(space: Utf8, index: int, value: str, shared_memory: Any) -> None:
    if value not in space:
        found = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"observation is not in {space}: found {found}; use {space}.fit(text)")
    data = np.frombuffer(shared_memory.get_obj(), dtype=np.uint8)
    slot = data.reshape(-1, _slot_bytes(space))[index]
    text = np.frombuffer(value.encode("utf-8"), dtype=np.uint8)
    slot[_HEADER : _HEADER + len(text)] = text
    slot[:_HEADER].view(np.int64)[0] = len(text)
