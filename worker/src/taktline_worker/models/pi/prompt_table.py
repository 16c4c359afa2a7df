"""Prompts of π0.5 by their parts: an instruction's words are tokenised once, and a state's numbers looked up.

A tokenizer may join what stands side by side. None of those that the checkpoints bring does so across the places where
a state's numbers begin and end, and whether one does is a matter of its vocabulary: text is cut into pieces of it, and
where no piece reaches across a place, both sides are cut as they would be by themselves.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taktline_worker.models.pi.tokenizer import BOS_ID, Tokenizer

NUMBERS = range(-1, 256)
"""What `state_bins` gives."""
_KEPT = 256
_ACROSS = re.compile(r":[▁Ġ ]|[0-9][▁Ġ ]|[0-9];")
"""What a piece has within that reaches from the words to a number, from one to the next, or to the end."""
_WORDS = "Task: pick up the block, State:"
_TRIED = 64
"""Lists of numbers that are compared, too, so that a tokenizer with rules beside its pieces is noticed."""


class Words(NamedTuple):
    """Ids of all before the first number, BOS first; their address, which is good while `ids` is there."""

    ids: NDArray[np.int64]
    address: int
    length: int


class PromptTable:
    """Ids of `Task: <words>, State: <numbers>;\\nAction: `.

    Attributes:
        numbers: ids of each of `NUMBERS` with the space before it.
        end: ids of all behind the last number.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError where a prompt's ids are not those of its parts."""
        across = [piece for piece in tokenizer.vocabulary() if _ACROSS.search(piece)]
        if across:
            raise ValueError(f"its piece {across[0]!r} joins a prompt's parts")
        self._tokenizer = tokenizer
        words = tokenizer.encode(_WORDS)
        self.numbers = [self._behind(words, f"{_WORDS} {number}") for number in NUMBERS]
        self.end = self._behind([*words, *self.numbers[1]], f"{_WORDS} 0;\nAction: ")
        self._words: OrderedDict[str, Words] = OrderedDict()
        draw = np.random.default_rng(0)
        for count in range(1, _TRIED + 1):
            tried = draw.integers(NUMBERS.start, NUMBERS.stop, count).tolist()
            said = f"{_WORDS}{''.join(f' {number}' for number in tried)};\nAction: "
            if tokenizer.encode(said) != [*words, *(i for n in tried for i in self.numbers[n + 1]), *self.end]:
                raise ValueError("it cuts numbers side by side in another way than by themselves")

    def words(self, instruction: str, cleaned: Callable[[str], str]) -> Words:
        """Those of an instruction; `cleaned` makes the prompt's words of one that is new, or raises."""
        found = self._words.get(instruction)
        if found is None:
            ids = np.array([BOS_ID, *self._tokenizer.encode(f"Task: {cleaned(instruction)}, State:")], np.int64)
            found = Words(ids, int(ids.ctypes.data), len(ids))
            if len(self._words) >= _KEPT:
                self._words.popitem(last=False)
            self._words[instruction] = found
        return found

    def _behind(self, begin: list[int], text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        if ids[: len(begin)] != begin:
            raise ValueError("it cuts a text's begin by what follows")
        return ids[len(begin) :]
