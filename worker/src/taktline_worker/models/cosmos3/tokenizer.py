"""The checkpoint's own tokenizer and chat template: a user's turn to token ids."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from taktline_worker.chat_template import ChatTemplate, token_text
from taktline_worker.checkpoint import read_json, refuse

TOKENIZER_FOLDER = "text_tokenizer"
_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
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
        self._template = ChatTemplate(where, config)
        self._where = where
        stop = config.get("eos_token")
        self.specials = (self._special(token_text(stop), "eos_token"), self._special(_VISION_START, _VISION_START))
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
        turn = self._template.user_turn(text, add_vision_id=False)
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
