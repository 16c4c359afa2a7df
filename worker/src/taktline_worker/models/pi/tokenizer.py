"""The checkpoint's own tokenizer file, sentencepiece or Hugging Face, behind one small interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import sentencepiece
from tokenizers import Tokenizer as HuggingFaceTokenizer

from taktline_worker.checkpoint import refuse

PAD_ID, EOS_ID, BOS_ID = 0, 1, 2
_PALIGEMMA_PIECES = 257_152
_PALIGEMMA_NEWLINE = 108


class Tokenizer(Protocol):
    """Text to ids, without special tokens."""

    @property
    def path(self) -> Path:
        """The file it was read from."""

    @property
    def pieces(self) -> int:
        """Number of ids, the largest id plus one."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no BOS, no EOS."""

    def vocabulary(self) -> list[str]:
        """All that an id may stand for; a space may be another sign there."""


class SentencePieceTokenizer:
    """A `tokenizer.model` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise refuse(f"{path} is no sentencepiece model: {error}", "fetch the tokenizer again") from error
        self.pieces = int(self._processor.vocab_size())
        ids = (self._processor.pad_id(), self._processor.eos_id(), self._processor.bos_id())
        _check_special(path, ids, self)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no BOS, no EOS."""
        return [int(i) for i in self._processor.encode(text)]

    def vocabulary(self) -> list[str]:
        """All that an id may stand for; a space is `▁`."""
        return list(self._processor.id_to_piece(list(range(self.pieces))))


class JsonTokenizer:
    """A `tokenizer.json` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the Rust binding raises a bare Exception for every kind of bad file
            raise refuse(f"{path} is no tokenizer file: {error}", "fetch the tokenizer again") from error
        # The stored file may pad or cut by itself; the processor does both, at the checkpoint's own budget.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.pieces = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        ids = tuple(self._tokenizer.token_to_id(token) for token in ("<pad>", "<eos>", "<bos>"))
        _check_special(path, ids, self)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no BOS, no EOS."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def vocabulary(self) -> list[str]:
        """All that an id may stand for; a space may be another sign there."""
        return list(self._tokenizer.get_vocab(with_added_tokens=True))


def load_tokenizer(folder: Path, named: str, *, prefer_json: bool) -> Tokenizer:
    """Finds and reads the tokenizer of a checkpoint folder.

    Args:
        named: what the processor file calls it: a folder or file inside `folder`, or a hub name, which this platform
            never fetches and looks for locally instead; may be empty.
        prefer_json: LeRobot reads `tokenizer.json`, openpi `tokenizer.model`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where no tokenizer is found, or it is not a PaliGemma-like one.
    """
    root = folder.resolve()
    places = [path for path in ((root / named).resolve(), root, root / "tokenizer") if path.is_relative_to(root)]
    files = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")
    ordered = files if prefer_json else (*files[1:], files[0])
    for place in dict.fromkeys(places):
        if place.is_file():
            return _read(place)
        for name in ordered:
            if (place / name).is_file():
                return _read(place / name)
    raise refuse(
        f"{folder} holds no tokenizer" + (f" (its processor names {named!r})" if named else ""),
        f"copy PaliGemma's tokenizer.json or tokenizer.model into {folder}",
    )


def _read(path: Path) -> Tokenizer:
    return JsonTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def _check_special(path: Path, ids: tuple[int | None, ...], tokenizer: Tokenizer) -> None:
    if ids != (PAD_ID, EOS_ID, BOS_ID):
        raise refuse(
            f"{path} has (pad, eos, bos) = {ids}, PaliGemma's are {(PAD_ID, EOS_ID, BOS_ID)}",
            "use the tokenizer that the checkpoint was trained with",
        )
    if tokenizer.pieces >= _PALIGEMMA_PIECES and tokenizer.encode("\n") != [_PALIGEMMA_NEWLINE]:
        raise refuse(f"{path} does not encode a newline as {_PALIGEMMA_NEWLINE}", "use PaliGemma's own tokenizer")
