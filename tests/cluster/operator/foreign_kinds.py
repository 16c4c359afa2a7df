"""CustomResourceDefinitions of other products as their published types make them: the API server refuses as theirs.

They are generated from the products' own Go types (foreign_crds/README.md).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FOLDER = Path(__file__).parent / "foreign_crds"


def published() -> list[Json]:
    """Every definition that the tests install."""
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(FOLDER.glob("*.json.gz"))]
