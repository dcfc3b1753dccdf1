#!/usr/bin/env bash
# Everything there is to check on a bare GPU machine without network, in three parts.
#
#     benchmarks/gpu_suite.sh A [OUT]     # equality: the kernels' bytes, streams, launch overhead
#     benchmarks/gpu_suite.sh B [OUT]     # speed: layouts of stores, tables, sizes
#     benchmarks/gpu_suite.sh C [OUT]     # DeepSpeed with several ranks on one GPU; memory checks
#
# A part takes at most LIMIT seconds (540) and depends on no other one. It writes summary_A.json,
# anew after every section, and A.tar.gz with all logs to OUT (gpu_suite_out), and prints its table
# last. Caches, logs and installed wheels lie in CACHE, outside OUT.
#
# Needs a Python with torch (CUDA), numpy and, for most sections, CuPy, pytest and hypothesis:
# PYTHON=/path/to/python. What else the machine lacks is brought along as wheels in WHEELS (wheels/
# in the checkout), which benchmarks/gpu/collect_wheels.sh fills on a machine with a network; a
# section whose packages are missing costs a null. DRY=1 runs the same sections on the CPU at small
# sizes, to test this script. Exits with 1 if a section failed.
set -uo pipefail

ROOT="$(cd "$(dirname "$0")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
CACHE="${CACHE:-${TMPDIR:-/tmp}/ds_quant_gpu_suite_$(id -u)}"
WHEELS="${WHEELS:-$ROOT/wheels}"
mkdir -p "$CACHE" && CACHE="$(cd "$CACHE" && pwd)" || exit 1
OUT="$(mkdir -p "${2:-gpu_suite_out}" && cd "${2:-gpu_suite_out}" && pwd)" || exit 1

SITE="$CACHE/site"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$SITE" "$WHEELS"/*.whl || echo "gpu_suite.sh: wheels cannot be installed" >&2
fi
export PYTHONPATH="$ROOT:$ROOT/benchmarks:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$CACHE/cupy}" TRITON_CACHE_DIR="$CACHE/triton"
export TORCHINDUCTOR_CACHE_DIR="$CACHE/inductor" TORCH_EXTENSIONS_DIR="$CACHE/extensions"
cd "$ROOT" || exit 1
exec "$PYTHON" benchmarks/gpu/suite.py "${1:-}" --out "$OUT" --work "$CACHE/work_${1:-}" \
    --seconds "${LIMIT:-540}" $([ "${DRY:-0}" = 1 ] && echo --dry)
