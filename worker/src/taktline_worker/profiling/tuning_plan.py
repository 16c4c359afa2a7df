"""What the shipped tables are measured on: every policy of a published size, in the shapes that are served.

Layers of a tower are alike, so that a few of each do; enough of them that weights come from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.profiling.subject import Request

SHIPPED = "shipped"
"""Policy argument that stands for all of `PLAN`; followed by a colon and a key, for that part."""

_ALL = (1, 2, 4, 8, 16, 32)
_ENDS = (1, 32)


def _requests(
    policy: str,
    batches: tuple[int, ...],
    views: tuple[int, ...] = (0,),
    prompts: tuple[int, ...] = (0,),
    precision: str = "bf16",
    layers: int = 4,
) -> Iterator[Request]:
    for cameras, tokens in product(views, prompts):
        yield Request(f"random:{policy}", batches, "cuda", precision, cameras, tokens, layers=layers)


def _pi05() -> Iterator[Request]:
    """The published measurements' shapes, then prompts with a state as graphs hold them."""
    yield from _requests("pi05", _ALL, (3,), (1,))
    yield from _requests("pi05", _ENDS, (3,), (200,))
    yield from _requests("pi05", _ENDS, (2,), (60,))
    yield from _requests("pi05", (1,), (3, 2), (64, 128))
    yield from _requests("pi05", (1,), (2,), (200,))
    yield from _requests("pi05", (1,), (1,), (64,))
    yield from _requests("pi05", (1, 8, 32), (3,), (1,), precision="fp8")
    yield from _requests("pi05", (1,), (3,), (1,), precision="fp32")


def _pi0() -> Iterator[Request]:
    """Prompts without a state are shorter, and the state is one more token of the expert's first step."""
    yield from _requests("pi0", _ALL, (3,), (1,))
    yield from _requests("pi0", (1,), (3, 2), (16, 48))


def _groot() -> Iterator[Request]:
    """Three layers of the text take the vision tower's features and end otherwise than those behind them."""
    yield from _requests("gr00t-n1.7", _ALL, (2,), layers=6)
    # Five views are more than the head's chain of kernels holds.
    yield from _requests("gr00t-n1.7", (1,), (1, 4, 5), layers=6)
    yield from _requests("gr00t-n1.7", (1, 8), (2,), precision="fp8", layers=6)


def _minicpm() -> Iterator[Request]:
    """Layers of the head are small: eight of them are more than the cache holds."""
    yield from _requests("minicpm-robot", (1, 2, 4, 8), (2,), layers=8)
    # A long prompt is more than the head's chain of kernels holds.
    yield from _requests("minicpm-robot", (1,), (2,), (420,), layers=8)
    yield from _requests("minicpm-robot", (1,), (1, 3), layers=8)
    yield from _requests("minicpm-robot", (1, 8), (2,), precision="fp8", layers=8)
    yield from _requests("minicpm-robot", (1,), (2,), precision="fp32")


def _cosmos3() -> Iterator[Request]:
    """With all layers: what wins in four of them may lose at the power limit, where whole requests run."""
    for name in ("cosmos3-nano", "cosmos3-nano-branch", "cosmos3-edge"):
        for precision in ("bf16", "fp8"):
            yield from _requests(name, (1,), precision=precision, layers=0)


def _planner() -> Iterator[Request]:
    """Units of candidates as one GPU and many have them."""
    for precision in ("bf16", "fp8"):
        yield from _requests("vjepa2-ac", (100, 16), precision=precision, layers=6)


PLAN: dict[str, Callable[[], Iterator[Request]]] = {
    "pi05": _pi05,
    "pi0": _pi0,
    "groot": _groot,
    "minicpm": _minicpm,
    "cosmos3": _cosmos3,
    "planner": _planner,
}
"""Part -> its requests."""


def planned(policy: str) -> Iterator[Request]:
    """The requests of `SHIPPED`, or of one part of it.

    Raises:
        TaktlineError: CONFIG_INVALID for a part that there is not.
    """
    _, _, part = policy.partition(":")
    if part and part not in PLAN:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"the shipped tables are not measured on {part!r}",
            f"choose {SHIPPED}, or {SHIPPED}: and one of {', '.join(PLAN)}",
        )
    for name, requests in PLAN.items():
        if part in ("", name):
            yield from requests()
