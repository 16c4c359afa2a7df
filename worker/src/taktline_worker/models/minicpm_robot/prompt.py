"""The prompt of one request: the checkpoint's chat template around its images and the instruction, as token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.chat_template import ChatTemplate, token_text
from taktline_worker.checkpoint import read_json, refuse

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
MAX_INSTRUCTION_CHARACTERS = 4096
MAX_TOKENS = 1024
"""Longest sequence of images, template and text in one request."""
_NAMES = ("image_token", "image_start_token", "image_end_token", "image_id_start_token", "image_id_end_token")
_HOLDERS = ("extra_special_tokens", "model_specific_special_tokens")


class Prompt:
    """Stateless after construction; safe to share between threads.

    Args:
        image_tokens: of each image.
        vocabulary: rows of the embedding.
        image_token: id that config.json states, or None.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where a file is absent, damaged, or of another model.
    """

    def __init__(self, folder: Path, image_tokens: int, vocabulary: int, image_token: int | None) -> None:
        config = read_json(folder / TOKENIZER_CONFIG)
        self._template = ChatTemplate(folder, config)
        self._tokenizer = _open(folder / TOKENIZER_FILE)
        self.pieces = self._tokenizer.get_vocab_size()
        holders = (config, *(config[name] for name in _HOLDERS if isinstance(config.get(name), dict)))
        texts = {name: next((token_text(held[name]) for held in holders if name in held), None) for name in _NAMES}
        ids = {name: text and self._tokenizer.token_to_id(text) for name, text in texts.items()}
        unknown = sorted(name for name, found in ids.items() if not isinstance(found, int))
        if unknown:
            raise refuse(
                f"{TOKENIZER_CONFIG} and {TOKENIZER_FILE} do not give {', '.join(unknown)}",
                "copy the tokenizer's files as published with the checkpoint",
            )
        self._texts = {name: str(text) for name, text in texts.items()}
        self.image_token = int(ids["image_token"] or 0)
        if image_token not in (None, self.image_token) or self.pieces > vocabulary:
            raise refuse(
                f"the tokenizer has {self.pieces} pieces and {self._texts['image_token']!r} as {self.image_token}; the "
                f"network has {vocabulary} and {image_token}",
                "use the tokenizer's files of this very checkpoint",
            )
        path = folder / PREPROCESSOR_CONFIG
        numbered = bool((read_json(path) if path.is_file() else {}).get("use_image_id", True))
        t = self._texts
        image = f"{t['image_start_token']}{t['image_token'] * image_tokens}{t['image_end_token']}"
        number = f"{t['image_id_start_token']}%d{t['image_id_end_token']}" if numbered else ""
        self._image = number + image
        self._numbered = numbered
        self._image_tokens = image_tokens

    def tokens(self, instruction: str, images: int) -> NDArray[np.int64]:
        """int64 (n,) ids of one user turn: every image first, then the instruction as it is given.

        Raises:
            TaktlineError: INSTRUCTION_INVALID where it is empty, too long, or holds the tokenizer's own symbols.
        """
        if len(instruction) > MAX_INSTRUCTION_CHARACTERS:
            reason = f"it has {len(instruction)} characters, the limit is {MAX_INSTRUCTION_CHARACTERS}"
            raise _invalid(reason, "shorten it")
        if not instruction.strip():
            raise _invalid("it is empty", "say what the robot shall do")
        own = next((text for text in ("<|", *self._texts.values()) if text in instruction), None)
        if own is not None:
            raise _invalid(f"it holds {own!r}, one of the tokenizer's own symbols", "leave it out")
        content = [{"type": "image"}] * images + [{"type": "text", "text": instruction}]
        pieces = self._template.user_turn(content).split(self._texts["image_token"])
        if len(pieces) != images + 1:
            raise refuse(
                f"the chat template puts {len(pieces) - 1} images where {images} are sent",
                "copy the tokenizer's files as published with the checkpoint",
            )
        text = pieces[0]
        for index, piece in enumerate(pieces[1:]):
            text += (self._image % index if self._numbered else self._image) + piece
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        if len(ids) > MAX_TOKENS:
            reason = f"with {images} images the prompt has {len(ids)} tokens, the limit is {MAX_TOKENS}"
            raise _invalid(reason, "shorten it")
        assert int((ids == self.image_token).sum()) == images * self._image_tokens
        return ids


def _open(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise refuse(f"{path} does not exist", "copy it as published with the checkpoint")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise refuse(f"{path} is no tokenizer: {error}", "copy it again from the checkpoint's repository") from error


def _invalid(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INSTRUCTION_INVALID, f"the instruction is unusable: {reason}", next_step)
