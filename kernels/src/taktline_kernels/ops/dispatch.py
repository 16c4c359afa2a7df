"""How an op finds its implementation: the selector names it, the accelerated modules load on first use."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from taktline_kernels.fp8_rows import Fp8Rows
from taktline_kernels.selector import REFERENCE, Choice, default_selector

logger = logging.getLogger(__name__)

Implementation = Callable[..., Any]


class Op:
    """One operation: its torch reference and, by name, where the accelerated versions live.

    An accelerated version is "module:function"; it takes the reference's arguments and `config`. Its module is
    imported only when a table asks for it, so that a machine without Triton or CUDA never loads it.
    """

    def __init__(self, name: str, reference: Implementation, accelerated: Mapping[str, str]) -> None:
        self.name = name
        self.reference = reference
        self._accelerated = dict(accelerated)
        self._loaded: dict[str, Implementation | None] = {}

    def implementations(self) -> tuple[str, ...]:
        """Name every implementation, the reference first."""
        return (REFERENCE, *self._accelerated)

    def load(self, kernel: str) -> Implementation:
        """Return the accelerated implementation called `kernel`.

        Raises:
            KeyError: no such implementation.
            ImportError: its module cannot be imported here.
        """
        module, function = self._accelerated[kernel].split(":")
        implementation: Implementation = getattr(importlib.import_module(module), function)
        return implementation

    def run(self, shape: Mapping[str, int], like: torch.Tensor, *args: Any) -> Any:
        """Run the call with the implementation that the selector names for it."""
        if like.requires_grad:  # only the references can be differentiated
            return self.reference(*args)
        choice = default_selector().choose(self.name, shape, like.dtype, like.device)
        if choice.kernel == REFERENCE:
            return self.reference(*args)
        if choice.kernel not in self._loaded:
            try:
                self._loaded[choice.kernel] = self.load(choice.kernel)
            except (ImportError, KeyError) as error:
                logger.warning(
                    "kernel named by the table cannot be loaded; the torch reference runs",
                    extra={"op": self.name, "kernel": choice.kernel, "cause": str(error)},
                )
                self._loaded[choice.kernel] = None
        implementation = self._loaded[choice.kernel]
        if implementation is None:
            instead = Choice(REFERENCE, f"kernel {choice.kernel} cannot be loaded here, which {choice.reason} names")
            default_selector().note(self.name, shape, like.dtype, like.device, instead)
            return self.reference(*args)
        return implementation(*args, config=choice.config)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """An operation with one kernel, which the selector is asked for all the same: `explain` lists it as any other.

    Args:
        function: named as the operation; its first argument is the tensor that the operation is about.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **settings: _P.kwargs) -> _R:
        like = args[0].values if isinstance(args[0], Fp8Rows) else args[0]
        assert isinstance(like, torch.Tensor)
        shape = {"rows": like.numel() // like.shape[-1], "width": like.shape[-1]}
        default_selector().choose(function.__name__, shape, like.dtype, like.device)
        return function(*args, **settings)

    return run


REGISTRY: dict[str, Op] = {}


def register(name: str, reference: Implementation, accelerated: Mapping[str, str]) -> Op:
    """Make an op known to `explain`, `tune` and the tests."""
    REGISTRY[name] = Op(name, reference, accelerated)
    return REGISTRY[name]
