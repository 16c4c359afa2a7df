"""Model families by name; each line says where a family's loader is, imported only when it is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig

from taktline_worker.adapter import Adapter
from taktline_worker.delivery import in_use

# A family that comes in here also becomes `loaded` in taktline_protocol.families: the operator reads it there.
FAMILIES: dict[str, str] = {
    "cosmos3-edge": "taktline_worker.models.cosmos3.adapter",
    "cosmos3-nano": "taktline_worker.models.cosmos3.adapter",
    "gr00t-n1.7": "taktline_worker.models.groot.adapter",
    "minicpm-robot": "taktline_worker.models.minicpm_robot.adapter",
    "pi0": "taktline_worker.models.pi.adapter",
    "pi05": "taktline_worker.models.pi.adapter",
    "vjepa2-ac": "taktline_worker.models.vjepa2_ac.adapter",
}

QUANTISED = ("pi0", "pi05")
"""Families that follow `engine.quantisation`."""
DEGRADABLE = ("pi0", "pi05")
"""Families that follow `engine.cheaper_steps` and `engine.shorter_horizons`."""


def load_adapter(config: EngineConfig) -> Adapter:
    """Loads the policy of `config` by its family's loader.

    Raises:
        TaktlineError: CONFIG_INVALID for an unknown family; else what the loader raises.
    """
    module = FAMILIES.get(config.model.family)
    if module is None:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"model.family {config.model.family!r} is unknown",
            f"known families: {', '.join(sorted(FAMILIES))}",
        )
    if config.engine.quantisation is not None and config.model.family not in QUANTISED:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"engine.quantisation is set, and family {config.model.family} keeps its weights as engine.precision says",
            f"leave spec.engine.quantisation out; it is there for {' and '.join(QUANTISED)}",
        )
    for option in ("cheaper_steps", "shorter_horizons"):
        if getattr(config.engine, option) and config.model.family not in DEGRADABLE:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"engine.{option} is set, and family {config.model.family} answers at one quality only",
                f"leave it out of spec.engine; it is there for {' and '.join(DEGRADABLE)}",
            )
    in_use.hold(Path(config.model.path))
    return cast(Adapter, importlib.import_module(module).load(config))
