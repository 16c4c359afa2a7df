"""What `rows.c` does for a request: the prompt of a state in one call, and all that a launch asks of CUDA in another.

Between two requests of one robot everything that they need leaves the caches, so that what counts is how much code a
request passes, and not how often. What is out of the ordinary is left to the statement in Python.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from taktline_worker.compiled import library_of
from taktline_worker.models.pi.config import PiConventions
from taktline_worker.models.pi.normalise import Normaliser
from taktline_worker.models.pi.prompt_table import PromptTable
from taktline_worker.models.pi.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("rows.c")


class _Prompts(ctypes.Structure):
    """`Prompts` of the C file."""

    _fields_ = (
        ("low", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("first", ctypes.c_int32 * 259),
        ("dims", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("budget", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("single", ctypes.c_int32),
    )


class NativeRows:
    """The library. Raises OSError where it cannot be had here."""

    def __init__(self) -> None:
        with library_of(_SOURCE) as path:
            library = ctypes.PyDLL(str(path))  # all of it is quickly done, so it keeps the interpreter's lock
            self.prompt, self.launch = library.taktline_pi_prompt, library.taktline_launch
        address, number = ctypes.c_void_p, ctypes.c_int
        self.prompt.argtypes = (address, ctypes.c_char_p, number, address, number, address)
        self.launch.argtypes = (address,)


def native_rows() -> NativeRows | None:
    """None where they cannot be had, which is logged: Python does all of it then."""
    try:
        return NativeRows()
    except OSError as error:
        logger.warning("rows that are alone take the long way: %s", error)
        return None


class NativePrompts:
    """Prompts of one policy.

    Args:
        dims: numbers of a state.
        width: numbers of a prompt, zeros behind the state's; 0 where they are the state's.
        budget: most ids of a prompt.

    Raises:
        ValueError: the policy normalises states in a way that the C file does not.
    """

    def __init__(
        self, rows: NativeRows, table: PromptTable, normaliser: Normaliser, dims: int, width: int, budget: int
    ) -> None:
        rule, scale = normaliser.dividing(dims)
        self._table, self._prompt, self._state, self._budget = table, rows.prompt, (dims,), budget
        parts = [*table.numbers, table.end]
        ids = np.array([i for part in parts for i in part], np.int64)
        first = np.cumsum([0, *map(len, parts)]).tolist()
        self._kept = [np.ascontiguousarray(normaliser.low[:dims]), np.ascontiguousarray(scale), ids]
        low, scales, numbers = map(_address, self._kept)
        self._told = _Prompts(low, scales, numbers, (ctypes.c_int32 * 259)(*first), dims, max(width, dims), budget)
        self._told.rule, self._told.single = rule, int(scale.dtype == np.float32)
        self._where = ctypes.addressof(self._told)
        self._ahead: deque[tuple[NDArray[np.int64], int]] = deque()

    def tokens(
        self, instruction: str, state: NDArray[np.generic], cleaned: Callable[[str], str]
    ) -> NDArray[np.int64] | None:
        """Ids of a prompt, for a state as it came; None where that is no ordinary one, or the prompt too long.

        Args:
            cleaned: makes a prompt's words of an instruction that is new, or raises.
        """
        words = self._table.words(instruction, cleaned)
        if state.dtype.char not in "df" or state.shape != self._state:
            return None
        made, where = self._ahead.pop() if self._ahead else self._memory()
        count = self._prompt(self._where, state.tobytes(), state.itemsize, words.address, words.length, where)
        return made[:count] if count else None

    def look_ahead(self) -> None:
        """Gets what the next prompt needs."""
        if not self._ahead:
            self._ahead.append(self._memory())

    def _memory(self) -> tuple[NDArray[np.int64], int]:
        made = np.empty(self._budget, np.int64)
        return made, _address(made)


def native_prompts(
    rows: NativeRows, conventions: PiConventions, tokenizer: Tokenizer, vocabulary: int
) -> NativePrompts | None:
    """Those of a checkpoint with `vocabulary` ids; None, and why is logged, where its prompts need more."""
    c = conventions
    if c.prompt != "state" or c.adapt_to_pi:
        return None
    try:
        table = PromptTable(tokenizer)
        if max(map(max, [*table.numbers, table.end])) >= vocabulary:
            raise ValueError("its ids are beyond the checkpoint's vocabulary")
        return NativePrompts(rows, table, c.state_normaliser, c.state_dim, c.state_prompt_width, c.prompt_tokens)
    except ValueError as error:
        logger.info("prompts are tokenised anew for each request: %s", error)
        return None


class _Copy(ctypes.Structure):
    """`Copy` of the C file."""

    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class Launch:
    """Copies to the device, and then one computation.

    Args:
        graphs: executable graphs, as CUDA's runtime has them, in their order.
        copies: most copies.
    """

    def __init__(self, rows: NativeRows, graphs: Sequence[int], copies: int) -> None:
        class Told(ctypes.Structure):
            """`Launch` of the C file."""

            _fields_ = (
                *((name, ctypes.c_void_p) for name in ("copy", "record", "launch", "event", "stream", "graphs")),
                *((name, ctypes.c_int32) for name in ("count", "copies")),
                ("copy_of", _Copy * copies),
            )

        self._launch, self._graphs, self._told = rows.launch, (ctypes.c_void_p * len(graphs))(*graphs), Told()
        names = "cudaMemcpyAsync", "cudaEventRecord", "cudaGraphLaunch"
        runtime = cuda_runtime()
        functions = [ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in names]
        self._told.copy, self._told.record, self._told.launch = functions
        self._told.graphs, self._told.count = ctypes.addressof(self._graphs), len(graphs)

    def begin(self, copies: Sequence[tuple[int, int, int]], event: int, stream: int) -> None:
        """Copies (to, from, bytes), records an event and launches, without waiting.

        What is copied from must stay until that has run.

        Raises:
            RuntimeError: CUDA refused one of them.
        """
        told = self._told
        for held, copy in zip(told.copy_of, copies, strict=False):
            held.to, held.source, held.bytes = copy
        told.copies, told.event, told.stream = len(copies), event, stream
        error = self._launch(ctypes.addressof(told))
        if error:
            raise RuntimeError(f"CUDA refused the launch of a row with error {error}")


def cuda_runtime() -> ctypes.CDLL:
    """The runtime that PyTorch has loaded. Raises OSError where it has none."""
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")


def _address(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)
