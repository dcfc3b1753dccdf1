"""Where the files that ship beside the code are: scheme presets and CUDA sources.

In a checkout they lie at its top (``configs/``, ``cuda/``); a wheel carries them inside the
package. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("configs", "cuda")


def resource_dir(name: str) -> Path:
    """Folder of the resources ``name`` ("configs" or "cuda"), installed or in the checkout.

    Raises ``ValueError`` for another name and ``FileNotFoundError`` for a broken installation.
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
