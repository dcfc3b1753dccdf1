"""Find the data files of the package: scheme presets and CUDA sources.

In a checkout they are at its top (``configs/``, ``cuda/``), in a wheel inside the package. Standard
library only.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("configs", "cuda")


def resource_dir(name: str) -> Path:
    """Return the folder of the resources ``name`` ("configs" or "cuda").

    Raises:
        ValueError: another name.
        FileNotFoundError: a broken installation.
    """
    if name not in NAMES:
        raise ValueError(f"resource name {name!r}: allowed: {', '.join(NAMES)}")
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"ds_quant is installed without its {name}/ folder (looked in {package / name} and "
        f"{package.parent / name}): reinstall the package"
    )
