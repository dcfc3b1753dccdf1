"""Build backend: setuptools with the C++ kernels and the commands that setup.cfg cannot express.

pyproject.toml names this module. It does not import torch.

Environment variables:
    DS_QUANT_PURE: "1" builds a wheel without the C++ library, for every platform.
    DS_QUANT_HOMEPAGE: address of the repository. The metadata gets project links, relative links of
        the README become absolute, and its word HOMEPAGE becomes the address.

If the C++ compiler fails, the build warns and continues without the library; CPU tensors are then
encoded by the torch reference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import setuptools
from setuptools import build_meta
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

PURE = "DS_QUANT_PURE"
HOMEPAGE = "DS_QUANT_HOMEPAGE"

NATIVE = setuptools.Extension(
    "ds_quant.kernels._native",
    ["ds_quant/kernels/native.cpp", "ds_quant/kernels/lossless.cpp"],
    depends=["ds_quant/kernels/native.hpp"],
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


class _Library(build_ext):
    """Build a plain shared library: ctypes loads it, so it fits every version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class _Wheel(bdist_wheel):
    """Tag the wheel by platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class _Source(sdist):
    """Pack tests, docs and benchmarks too, so that the archive can be checked and repackaged."""

    def make_distribution(self) -> None:
        for rule in (
            *(
                f"graft {folder}"
                for folder in ("tests", "docs", "benchmarks", "cuda", "configs", ".ci")
            ),
            "include Makefile constraints.txt",
            "recursive-include ds_quant *.cpp *.hpp",
            "global-exclude *.py[co] *.so",
        ):
            self.filelist.process_template_line(rule)
        super().make_distribution()


def links(homepage: str) -> dict[str, object]:
    """Return setup() arguments with links to the repository's address."""
    readme = Path("README.md").read_text("utf-8").replace("HOMEPAGE", homepage.rstrip("/"))
    documents = f"{homepage.rstrip('/')}/blob/main"
    return {
        "url": homepage,
        "project_urls": {
            "Documentation": f"{documents}/docs",
            "Changes": f"{homepage.rstrip('/')}/releases",
            "Issues": f"{homepage.rstrip('/')}/issues",
        },
        "long_description": re.sub(r"\]\((?!https?:|#)", f"]({documents}/", readme),
    }


class _Backend(build_meta._BuildMetaBackend):
    """Pass the extension and the commands to setuptools.setup()."""

    def run_setup(self, setup_script: str = "setup.py") -> None:
        commands = {"build_ext": _Library, "bdist_wheel": _Wheel, "sdist": _Source}
        modules = [] if os.environ.get(PURE) == "1" else [NATIVE]
        homepage = os.environ.get(HOMEPAGE, "")
        metadata = links(homepage) if homepage else {}
        setuptools.setup(ext_modules=modules, cmdclass=commands, **metadata)


_backend = _Backend()
build_editable = _backend.build_editable
build_sdist = _backend.build_sdist
build_wheel = _backend.build_wheel
get_requires_for_build_editable = _backend.get_requires_for_build_editable
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
