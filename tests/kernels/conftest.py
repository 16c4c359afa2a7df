"""Triton's interpreter, which `tests/conftest.py` chooses where there is no GPU, made to work with NumPy 2.4."""

from __future__ import annotations

import importlib
import os

if os.environ.get("TRITON_INTERPRET") == "1":
    # Its loop bounds are arrays of one element, which NumPy 2.4 no longer turns into an int.
    scope = importlib.import_module("triton.runtime.interpreter")._LangPatchScope
    set_attr = scope.set_attr

    def set_attr_of_one_element(self: object, owner: object, attribute: str, value: object) -> None:
        if attribute == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        set_attr(self, owner, attribute, value)

    scope.set_attr = set_attr_of_one_element
