"""The chat template that a checkpoint brings: found in its folder, run in a sandbox, its failures typed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from taktline_worker.checkpoint import refuse

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """One checkpoint's template; safe to share between threads.

    Args:
        folder: that holds the template as a file of its own.
        config: tokenizer_config.json, which may hold it as a field instead.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where there is none, or none that can be read.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder = folder
        # Templates come with checkpoints: they run in a sandbox that reads what it is given and changes nothing.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        try:
            self._template = environment.from_string(self._text(config))
        except TemplateError as error:
            raise self._bad(error) from error
        self._constants = {name: token_text(config.get(name)) or "" for name in ("bos_token", "eos_token")}

    def user_turn(self, content: Any, **options: Any) -> str:
        """The text of one user turn and of the beginning of the answer.

        Args:
            content: a string, or a list of parts as templates of vision models take them.

        Raises:
            TaktlineError: CHECKPOINT_INVALID where the template fails.
        """
        messages = [{"role": "user", "content": content}]
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._constants, **options
            )
        except TemplateError as error:
            raise self._bad(error) from error

    def _text(self, config: dict[str, Any]) -> str:
        path = self._folder / TEMPLATE_FILE
        found = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(found, list):  # several by name
            found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
        if not isinstance(found, str) or not found:
            raise refuse(
                f"{self._folder} has no chat template",
                f"copy {TEMPLATE_FILE} or tokenizer_config.json as published with the checkpoint",
            )
        return found

    def _bad(self, error: TemplateError) -> Exception:
        return refuse(f"the chat template in {self._folder} fails: {error}", "copy the tokenizer's files as published")


def token_text(token: Any) -> str | None:
    """A special token as a configuration spells it: a string, or an object that has it as `content`."""
    found: str | None = token.get("content") if isinstance(token, dict) else token
    return found


def _raise(message: str) -> None:
    raise TemplateError(message)
