"""Write what is made from the config's schema: the guide's page of every key, and JSON Schemas beside the configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rlhf_kl
from rlhf_kl.config.load import json_schema
from rlhf_kl.config.reference import config_reference
from rlhf_kl.config.schema import KIND_NAMES

PACKAGE = Path(rlhf_kl.__file__).parent
COMPARE: dict[str, Any] = {
    "title": "A comparison",
    "type": "object",
    "additionalProperties": False,
    "required": ["base", "variants"],
    "properties": {
        "base": {"type": "string", "description": "The config of `rlhf-kl train` that all variants start from."},
        "seeds": {"type": "array", "items": {"type": "integer", "minimum": 0}, "description": "A run for each."},
        "variants": {
            "type": "object",
            "description": "By name: what each changes of the base.",
            "additionalProperties": {"$ref": "train.json"},
        },
    },
}


def documents() -> dict[Path, str]:
    """Path and content of every file."""
    schemas = {**{kind: json_schema(kind) for kind in KIND_NAMES}, "compare": COMPARE}
    folder = PACKAGE.parent / "configs" / "schema"
    return {
        PACKAGE / "guide" / "config_reference.md": config_reference(),
        **{folder / f"{name}.json": json.dumps(schema, indent=1) + "\n" for name, schema in schemas.items()},
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(PACKAGE.parent))
