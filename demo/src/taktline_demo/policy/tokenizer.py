"""A small PaliGemma-like tokenizer for the task's prompts, written as LeRobot and openpi read it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from taktline_demo.arm import COLOURS
from taktline_demo.policy.prompt import prompt_text
from taktline_demo.task import INSTRUCTIONS

PAD_ID, EOS_ID, BOS_ID, UNK_ID = 0, 1, 2, 3
_NEWLINES = ("\n", "\n\n")


def train_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes `tokenizer.model`, `tokenizer.json` and `tokenizer_config.json` into `folder`, with equal ids.

    Byte-pair encoding with byte fallback, so that no text has an unknown token; pad 0, eos 1, bos 2, unk 3. The
    integers 0 to 255 are one token each, so that a state bin is one token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(_corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        pad_id=PAD_ID,
        eos_id=EOS_ID,
        bos_id=BOS_ID,
        unk_id=UNK_ID,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=[*_NEWLINES, *(str(value) for value in range(256))],
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    (folder / "tokenizer.json").write_text(json.dumps(_fast_tokenizer(processor), ensure_ascii=False, indent=1) + "\n")
    config = {
        "backend": "tokenizers",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 1000000,
        "tokenizer_class": "GemmaTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Any:
    """The sentencepiece processor of `folder`."""
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def _corpus() -> list[str]:
    rng = np.random.default_rng(0)
    verbs = [text.format(colour) for text in INSTRUCTIONS for colour in COLOURS]
    return [prompt_text(text, rng.integers(-1, 256, 4)) for text in verbs for _ in range(20)]


def _fast_tokenizer(processor: Any) -> dict[str, Any]:
    """The same model as a `tokenizer.json`: pieces become a vocabulary, their scores an order of merges."""
    size = processor.vocab_size()
    pieces = [processor.id_to_piece(index) for index in range(size)]
    specials = [PAD_ID, EOS_ID, BOS_ID, UNK_ID]
    whole = {*specials, *(index for index, piece in enumerate(pieces) if piece in _NEWLINES or piece.isdecimal())}
    names = {piece: index for index, piece in enumerate(pieces)}
    ranked = sorted(
        (
            index
            for index in range(size)
            if index not in whole and not processor.is_byte(index) and len(pieces[index]) > 1
        ),
        key=lambda index: -processor.get_score(index),
    )
    merges = []
    for index in ranked:
        piece = pieces[index]
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in splits if pair[0] in names and pair[1] in names]
        merges.extend(sorted(known, key=lambda pair: (names[pair[0]], names[pair[1]])))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": pieces[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": index in specials,
            }
            for index in sorted(whole)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS_ID], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": names,
            "merges": [list(pair) for pair in merges],
        },
    }
