"""Build backend: setuptools, told about native.cpp, which setup.cfg cannot express.

pyproject.toml names this module, so it runs without torch. Without a working C++ compiler the
build says so and goes on; the torch reference then does the work on CPU tensors.
May import setuptools.
"""

from __future__ import annotations

import setuptools
from setuptools import build_meta

NATIVE = setuptools.Extension(
    "ds_quant.kernels._native",
    ["ds_quant/kernels/native.cpp"],
    language="c++",
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",  # no fused multiply-adds: every operation is rounded
        "-fno-math-errno",
        "-fno-trapping-math",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    optional=True,
)


class _Backend(build_meta._BuildMetaBackend):
    """The hook that setuptools documents for backends of a project's own."""

    def run_setup(self, setup_script: str = "setup.py") -> None:
        setuptools.setup(ext_modules=[NATIVE])


_backend = _Backend()
build_editable = _backend.build_editable
build_sdist = _backend.build_sdist
build_wheel = _backend.build_wheel
get_requires_for_build_editable = _backend.get_requires_for_build_editable
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
