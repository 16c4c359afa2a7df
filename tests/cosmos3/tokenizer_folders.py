"""Tiny tokenizers in the published layout (byte-level BPE, chat template), for tests."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from taktline_worker.models.cosmos3.tokenizer import TOKENIZER_FOLDER
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
VOCABULARY = 256 + len(SPECIALS)
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Every byte is a piece of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return found


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE, in_file: bool = False, **config: object) -> Path:
    """Writes `folder`/text_tokenizer; the template goes into a file of its own or into the configuration."""
    where = folder / TOKENIZER_FOLDER
    where.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(where / "tokenizer.json"))
    fields: dict[str, object] = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"} | config
    if template is not None and not in_file:
        fields["chat_template"] = template
    (where / "tokenizer_config.json").write_text(json.dumps(fields))
    if template is not None and in_file:
        (where / "chat_template.jinja").write_text(template)
    return folder
