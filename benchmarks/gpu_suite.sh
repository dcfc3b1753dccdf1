#!/usr/bin/env bash
# Everything there is to check on a bare GPU machine without network, in one command.
#
#     benchmarks/gpu_suite.sh [OUT]        # OUT: folder for logs and results, default gpu_suite_out
#
# Needs a Python with torch (CUDA), deepspeed, CuPy, pytest and hypothesis: PYTHON=/path/to/python.
# DRY=1 runs the same sections on the CPU at small sizes, to test this script.
# A section that fails or takes too long is reported and the next one runs. Writes OUT/summary.json
# and OUT/summary.txt; exits with 1 if a section failed.
set -uo pipefail

ROOT="$(cd "$(dirname "$0")/.." && pwd)"
OUT="$(mkdir -p "${1:-gpu_suite_out}" && cd "${1:-gpu_suite_out}" && pwd)"
PYTHON="${PYTHON:-python3}"
DRY="${DRY:-0}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TORCHDYNAMO_DISABLE=1
# Ranks that compile at once share a cache that can be written.
export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$OUT/cupy_cache}"
DEVICE=cuda
[ "$DRY" = 1 ] && DEVICE=cpu
cd "$ROOT" || exit 1
: >"$OUT/sections.txt"

# section NAME SECONDS COMMAND...: run with a time limit, keep the log, note result and duration.
section() {
    local name="$1" limit="$2" start code result
    shift 2
    start=$(date +%s)
    echo "== $name (at most $limit s)"
    timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    code=$?
    case $code in
        0) result=passed ;;
        124 | 137) result="time limit" ;;
        *) result="failed ($code)" ;;
    esac
    tail -n 4 "$OUT/$name.log"
    echo "$name|$result|$(($(date +%s) - start))" | tee -a "$OUT/sections.txt"
}

skip() { echo "$1|skipped: $2|0" | tee -a "$OUT/sections.txt"; }

kernels() { # further arguments for benchmarks/kernels.py
    "$PYTHON" benchmarks/kernels.py --device "$DEVICE" "$@"
}
export -f kernels
export PYTHON DEVICE

# Without setup.cfg: its warnings are errors, and fit the versions of the development environment.
PYTEST=(-m pytest -c /dev/null --rootdir . -p no:cacheprovider -W ignore -q tests/kernels/test_gpu.py)

section environment 60 "$PYTHON" -c '
import json, platform, shutil, subprocess, sys
from importlib import metadata
found = {"python": platform.python_version()}
for name in ("torch", "deepspeed", "cupy-cuda12x", "cupy-cuda13x", "triton", "numpy"):
    try: found[name] = metadata.version(name)
    except metadata.PackageNotFoundError: found[name] = None
import torch
found["cuda"] = torch.version.cuda
found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
if shutil.which("nvidia-smi"):
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,memory.total", "--format=csv"]
    found["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True).stdout
json.dump(found, open(sys.argv[1], "w"), indent=1)
print(json.dumps(found, indent=1))
' "$OUT/environment.json"

if [ "$DRY" = 1 ]; then
    section equality 120 "$PYTHON" "${PYTEST[@]}"
    section bars 120 bash -c 'kernels --codecs "int4 absmax g2048" --dtypes bf16 --rivals torch \
        --min-bytes 1e5 --max-bytes 1e5 --repeats 1 --json "$0/bars.json"' "$OUT"
    section simulation 120 "$PYTHON" benchmarks/one_gpu.py --device cpu --simulate 8 \
        --numel 100000 --json "$OUT/simulation.json"
    RANKS="2" STEPS=4
else
    section equality 300 "$PYTHON" "${PYTEST[@]}"
    section bars 240 bash -c 'kernels --codecs "int4 absmax" --min-bytes 2.5e8 --max-bytes 2e9 \
        --rivals triton --limit 200 --json "$0/bars.json" --plot "$0/bars.png"' "$OUT"
    section simulation 120 "$PYTHON" benchmarks/one_gpu.py --simulate 8 \
        --json "$OUT/simulation.json"
    section speed 600 bash -c 'kernels --limit 540 --json "$0/kernels.json" \
        --plot "$0/kernels.png"' "$OUT"
    section deepspeed 400 bash -c 'kernels --dtypes fp16 --rivals deepspeed --codecs "absmax" \
        --min-bytes 2e8 --max-bytes 2e8 --limit 360 --json "$0/deepspeed.json"' "$OUT"
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            section "$tool" 300 compute-sanitizer --tool "$tool" --error-exitcode 9 \
                "$PYTHON" "${PYTEST[@]}" -x \
                -k "ragged and (g96 or g8192 or g128) or rotation or recode"
        done
    else
        skip memcheck "no compute-sanitizer"
    fi
    RANKS="2 4" STEPS=30
fi
for world in $RANKS; do
    for stage in 2 3; do
        section "zero${stage}_world$world" 180 "$PYTHON" benchmarks/one_gpu.py \
            --device "$DEVICE" --world "$world" --stage "$stage" --steps "$STEPS" --width 128 \
            --json "$OUT/zero${stage}_world$world.json"
    done
done

"$PYTHON" - "$OUT" <<'SUMMARY'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
sections = {}
for line in (out / "sections.txt").read_text().splitlines():
    name, result, seconds = line.split("|")
    sections[name] = {"result": result, "seconds": int(seconds)}
documents = {}
for path in sorted(out.glob("*.json")):
    if path.name != "summary.json":
        documents[path.stem] = json.loads(path.read_text())
(out / "summary.json").write_text(
    json.dumps({"sections": sections, "results": documents}, indent=1) + "\n"
)
text = [f"{name:<20}{found['result']:<28}{found['seconds']:>5} s" for name, found in sections.items()]
for stem in ("bars", "kernels", "deepspeed"):
    for row in documents.get(stem, {}).get("rows", []):
        if "seconds" in row and row["bytes"] > 1e8:
            label = f"{row['operation']}, {row['codec']}, {row['dtype']}, {row['way']}"
            share = f"{row['share_of_copy']:.2f} of copy"
            text.append(f"{label:<86}{row['bytes'] / 1e6:>8.0f} MB {share}")
    for name, seconds in documents.get(stem, {}).get("launch_overhead_s", {}).items():
        text.append(f"launch overhead, {name}: {seconds * 1e6:.1f} us")
(out / "summary.txt").write_text("\n".join(text) + "\n")
print("\n".join(text))
bad = [name for name, found in sections.items() if not found["result"].startswith(("pass", "skip"))]
sys.exit(bool(bad))
SUMMARY
