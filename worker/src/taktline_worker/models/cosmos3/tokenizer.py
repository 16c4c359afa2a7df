"""The checkpoint's own tokenizer and chat template: a user's turn to token ids."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from taktline_worker.checkpoint import read_json, refuse

TOKENIZER_FOLDER = "text_tokenizer"
_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_VISION_START = "<|vision_start|>"


class ChatTokenizer:
    """Tokenizer of one checkpoint; safe to share between threads.

    Args:
        folder: of the checkpoint.
        vocabulary: rows of the embedding; ids beyond are a tokenizer of another model.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where a file is absent, damaged, or of another model.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        where = folder / TOKENIZER_FOLDER
        config = read_json(where / _CONFIG_FILE)
        self._tokenizer = _open(where / _TOKENIZER_FILE)
        self.pieces = self._tokenizer.get_vocab_size()
        template = _template(where, config)
        # Templates come with checkpoints: they run in a sandbox that reads what it is given and changes nothing.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._where = where
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise _bad_template(where, error) from error
        stop = config.get("eos_token")
        self._constants = {"bos_token": _text(config.get("bos_token")) or "", "eos_token": _text(stop) or ""}
        self.specials = (self._special(_text(stop), "eos_token"), self._special(_VISION_START, _VISION_START))
        self.unconditional = self.encode("")
        if max(self.unconditional) >= vocabulary or self.pieces > vocabulary:
            raise refuse(
                f"{where} has {self.pieces} pieces, the embedding {vocabulary}",
                "use the text_tokenizer folder of this very checkpoint: Nano and Edge have different ones",
            )

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of one user turn and the beginning of the answer, then the two specials that media follow.

        Raises:
            TaktlineError: CHECKPOINT_INVALID where the template fails.
        """
        try:
            turn = self._template.render(
                messages=[{"role": "user", "content": text}],
                add_generation_prompt=True,
                add_vision_id=False,
                tools=None,
                **self._constants,
            )
        except TemplateError as error:
            raise _bad_template(self._where, error) from error
        return (*self._tokenizer.encode(turn, add_special_tokens=False).ids, *self.specials)

    def _special(self, token: str | None, name: str) -> int:
        found = None if token is None else self._tokenizer.token_to_id(token)
        if found is None:
            raise refuse(
                f"{self._where} knows no {name}", "use the text_tokenizer folder as published with the checkpoint"
            )
        return found


def _open(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise refuse(f"{path} does not exist", "copy text_tokenizer as published with the checkpoint")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise refuse(f"{path} is no tokenizer: {error}", "copy it again from the checkpoint's repository") from error


def _template(where: Path, config: dict[str, Any]) -> str:
    """The chat template: a file of its own, or a field of the configuration."""
    path = where / _TEMPLATE_FILE
    found = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    if not isinstance(found, str) or not found:
        raise refuse(
            f"{where} has no chat template", f"copy {_TEMPLATE_FILE} or {_CONFIG_FILE} as published with the checkpoint"
        )
    return found


def _text(token: Any) -> str | None:
    """A special token as the configuration spells it: a string, or an object that has it as `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _raise(message: str) -> None:
    raise TemplateError(message)


def _bad_template(where: Path, error: TemplateError) -> Exception:
    return refuse(
        f"the chat template in {where} fails: {error}", "copy text_tokenizer as published with the checkpoint"
    )
