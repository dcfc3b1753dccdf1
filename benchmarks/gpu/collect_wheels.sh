#!/usr/bin/env bash
# Collects the packages that benchmarks/gpu_suite.sh needs besides torch, CuPy and pytest. Runs on a
# machine with a network, for one without.
#
#     benchmarks/gpu/collect_wheels.sh [DEST] [PYTHON_VERSION]    # default wheels/ 3.12
#
# DeepSpeed is built without its operators (pure Python). Its requirements, except torch and NumPy,
# are wheels for Linux x86-64 and the Python of the GPU machine, which may have older ones. Fails if
# all wheels together take more than 64 MiB.
set -euo pipefail

DEST="${1:-wheels}"
VERSION="${2:-3.12}"
PYTHON="${PYTHON:-python3}"
mkdir -p "$DEST"
platforms=()
for n in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)

DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$DEST" \
    "deepspeed>=0.17.6,<0.20"
# pip selects the pydantic_core and typing_extensions that pydantic requires.
"$PYTHON" -m pip download --only-binary=:all: --implementation cp --python-version "$VERSION" \
    "${platforms[@]}" --dest "$DEST" \
    "pydantic>=2" einops hjson msgpack ninja packaging psutil py-cpuinfo tqdm

size="$(du -sk "$DEST" | cut -f1)"
ls -l "$DEST"
if [ "$size" -gt 65536 ]; then
    echo "collect_wheels.sh: $size KiB, more than 64 MiB" >&2
    exit 1
fi
