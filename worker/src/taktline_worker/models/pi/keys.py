"""Stored tensor names -> canonical ones, for every published spelling of the π0 and π0.5 checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable

from taktline_worker.checkpoint import refuse

# The first pattern that matches decides. Hugging Face moved the towers between releases of its PaliGemma class, and
# LeRobot's training saver adds a leading `model.`.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^paligemma\.(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)$", r"vision.\1"),
        (r"^paligemma\.(?:model\.)?multi_modal_projector\.linear\.(weight|bias)$", r"projector.\1"),
        (r"^paligemma\.(?:language_model\.)?lm_head\.weight$", r"lm_head.weight"),
        (r"^paligemma\.(?:model\.)?language_model\.(?:model\.)?(.+)$", r"prefix.\1"),
        (r"^gemma_expert\.model\.(.+)$", r"expert.\1"),
    )
)
_HEAD = re.compile(
    r"^(action_in_proj|action_out_proj|state_proj|action_time_mlp_in|action_time_mlp_out|time_mlp_in|time_mlp_out)\.(weight|bias)$"
)
# Buffers that some savers store although they follow from the sizes, and heads that inference never reads.
_DROPPED = re.compile(r"(^gemma_expert\.lm_head\.weight$)|(\.position_ids$)|(\.inv_freq$)|(\.embed_scale$)")


def canonical_names(stored: Iterable[str]) -> dict[str, str]:
    """Maps each stored name that inference reads to its canonical name.

    Canonical names start with `vision.`, `projector.`, `prefix.`, `expert.`, `lm_head.` or a head's own name.

    Raises:
        TaktlineError: CHECKPOINT_INVALID for names this family does not know, or two names for one tensor.
    """
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    unknown: list[str] = []
    for name in stored:
        bare = name.removeprefix("model.")
        inner = bare.removeprefix("paligemma_with_expert.")
        if _DROPPED.search(inner):
            continue
        target = _canonical(bare, inner)
        if target is None:
            unknown.append(name)
            continue
        if target in taken:
            raise refuse(
                f"tensors {taken[target]!r} and {name!r} are both {target!r}", "remove the stale one of the two"
            )
        taken[target] = name
        found[name] = target
    if unknown:
        raise refuse(
            f"{len(unknown)} tensors do not belong to a π0 or π0.5 checkpoint: {', '.join(sorted(unknown)[:4])}",
            "merge LoRA weights first; variants with memory or history heads are not supported",
        )
    return found


def _canonical(bare: str, inner: str) -> str | None:
    if _HEAD.match(bare):
        return bare
    for pattern, replacement in _RULES:
        if pattern.match(inner):
            return pattern.sub(replacement, inner)
    return None


def family_of(canonical: Iterable[str]) -> str:
    """`pi0` or `pi05`, decided by the tensors alone: their config files may not say it, or say it wrongly.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where the tensors fit neither family, or both.
    """
    names = set(canonical)
    adaptive = any(name.startswith("expert.") and ".dense." in name for name in names)
    plain = any(name.startswith("expert.") and name.endswith("layernorm.weight") for name in names)
    pi05 = [adaptive, "time_mlp_in.weight" in names]
    pi0 = [plain, "state_proj.weight" in names, "action_time_mlp_in.weight" in names]
    if all(pi05) and not any(pi0):
        return "pi05"
    if all(pi0) and not any(pi05):
        return "pi0"
    raise refuse(
        "the tensors fit neither π0 (state_proj, action_time_mlp, plain expert norms) nor π0.5 (time_mlp, adaptive "
        "expert norms)",
        "check that the file is a complete π0 or π0.5 policy",
    )
