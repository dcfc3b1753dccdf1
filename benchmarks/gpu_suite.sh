#!/usr/bin/env bash
# All checks for a bare GPU machine without a network, in two calls.
#
#     timeout 300 benchmarks/gpu_suite.sh 1 "$OUT"   # bytes and speed of the kernels
#     timeout 520 benchmarks/gpu_suite.sh 2 "$OUT"   # FSDP2, ZeRO, memory, races, counters, loss
#
# A call ends by itself after 280 or 500 seconds (LIMIT), the installation of wheels included. Its
# most valuable sections come first; the last ones of the second call get what is left. After every
# section it replaces summary_1.txt (2) and 1.tar.gz, with all logs and figures, in OUT: the
# argument, else the variable of that name, else gpu_suite_out. Caches and installed wheels are in
# CACHE, outside OUT.
#
# Needs a Python with torch (CUDA), NumPy and, for most sections, CuPy, pytest, xdist and
# hypothesis: PYTHON=/path/to/python. Other packages are installed from wheels in WHEELS (wheels/ in
# the checkout), which benchmarks/gpu/collect_wheels.sh collects on a machine with a network. A
# section names the packages that are missing. DRY=1 runs the same sections on the CPU at small
# sizes, to test this script. Exits with 1 if a section failed.
set -uo pipefail

ROOT="$(cd "$(dirname "$0")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
CACHE="${CACHE:-${TMPDIR:-/tmp}/ds_quant_gpu_suite_$(id -u)}"
WHEELS="${WHEELS:-$ROOT/wheels}"
mkdir -p "$CACHE" && CACHE="$(cd "$CACHE" && pwd)" || exit 1
OUT="${2:-${OUT:-gpu_suite_out}}"
OUT="$(mkdir -p "$OUT" && cd "$OUT" && pwd)" || exit 1
case "${1:-}" in
    1) PART=1 LIMIT="${LIMIT:-280}" ;;
    2) PART=2 LIMIT="${LIMIT:-500}" ;;
    *) echo "gpu_suite.sh: '${1:-}': allowed: 1 or 2" >&2 && exit 2 ;;
esac

SITE="$CACHE/site"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$SITE" "$WHEELS"/*.whl || echo "gpu_suite.sh: wheels cannot be installed" >&2
fi
export PYTHONPATH="$ROOT:$ROOT/benchmarks:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$CACHE/cupy}" TORCH_EXTENSIONS_DIR="$CACHE/extensions"
# Without torch.compile, which DeepSpeed uses for helpers: compiling them takes too long.
export TORCHDYNAMO_DISABLE=1
cd "$ROOT" || exit 1
WORK="$CACHE/work_$PART" SECONDS_LEFT=$((LIMIT - SECONDS))
source benchmarks/gpu/runner.sh

losses=benchmarks/gpu/cpu_losses.json
# 31 M parameters.
gpt=(--layers 10 --width 512 --heads 8 --seq-len 256 --batch 8 --lr 1e-3)
gpt+=(--base-steps 300 --steps 60)
if [ "${DRY:-0}" = 1 ]; then
    device=cpu size=1e5 large=1e5 collect=(--collect-only) workers=()
    cupy=torch pytest="torch pytest hypothesis"
    gpt=(--layers 1 --width 16 --heads 1 --seq-len 16 --batch 1 --base-steps 2 --steps 2)
else
    device=cuda size=5e8 large=1e9 collect=() workers=(-n 12 --dist worksteal)
    cupy="torch cupy" pytest="torch cupy pytest hypothesis" gpt+=(--device cuda)
fi
deepspeed="torch deepspeed pydantic"
schemes=(full_precision sdp4bit lossless_w_g3)
# Without setup.cfg, which turns warnings of the development environment's versions into errors.
gpu_tests=("$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -W ignore -q
    tests/kernels/test_gpu.py "${collect[@]}")

sweep() { # NAME SECONDS
    section "$1" "$2" "$cupy" "$PYTHON" benchmarks/gpu/sweeps.py --sweep "$1" --device $device \
        --bytes $size --limit "{limit}" --json "{json}"
}

# Several ranks on the one GPU, over gloo.
ranks() { # NAME SECONDS NEEDS OPTIONS...
    section "$1" "$2" "pydantic $3" "$PYTHON" benchmarks/one_gpu.py --device $device \
        --json "{json}" --beside $losses --steps 12 --width 128 "${@:4}"
}

checker() { # TOOL SECONDS TESTS
    local tool=(compute-sanitizer --tool "$1" --error-exitcode 9) needs="$pytest compute-sanitizer"
    [ "${DRY:-0}" = 1 ] && tool=() needs="$pytest"
    section "$1" "$2" "$needs" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${tool[@]}" "${gpu_tests[@]}" \
        -x -k "$3"
}

part_1() {
    [ "${DRY:-0}" = 1 ] || section driver 5 nvidia-smi nvidia-smi -q
    section doctor 40 "$deepspeed" "$PYTHON" -m ds_quant doctor --json --no-processes
    section equality 150 "$pytest" "${gpu_tests[@]}" "${workers[@]}" -k "not more_than_2_to_the_31"
    section one_size 60 "$cupy" "$PYTHON" benchmarks/kernels.py --device $device --json "{json}" \
        --limit "{limit}" --min-bytes $large --max-bytes $large --dtypes bf16 --ways auto
    [ "${DRY:-0}" = 1 ] || section prediction 10 torch "$PYTHON" benchmarks/kernel_instructions.py \
        --measured "$WORK/one_size.json"
}

part_2() {
    ranks fsdp2_2 55 "$cupy" --front fsdp2 --world 2 --schemes full_precision qsdp
    section precompile 40 "$deepspeed $cupy" "$PYTHON" benchmarks/gpu/precompile.py \
        --device $device --json "{json}" --schemes "${schemes[@]}"
    ranks zero3_2 70 "$deepspeed" --stage 3 --world 2 --at-once 3 --schemes "${schemes[@]}"
    ranks fsdp2_2x2 65 "$cupy" --front fsdp2 --world 4 --node-size 2 --schemes eden4 lossless_w_g3
    checker memcheck 85 "large_rows and g96 or recode or lossless_rows"
    checker racecheck 65 "lossless_rows or gaussian"
    local metrics profiler=()
    metrics="gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed"
    metrics+=",sm__throughput.avg.pct_of_peak_sustained_elapsed,smsp__inst_executed.sum"
    [ "${DRY:-0}" = 1 ] || profiler=(ncu --clock-control none --csv --metrics "$metrics"
        --kernel-name "regex:encode|decode_sum|recode")
    section counters 40 "$cupy ${profiler[0]:-}" "${profiler[@]}" \
        "$PYTHON" benchmarks/gpu/sweeps.py --sweep five --device $device --bytes $size
    sweep stores 40
    sweep priority 25
    # What is left.
    ranks zero2_2 60 "$deepspeed" --stage 2 --world 2 --at-once 3 --schemes "${schemes[@]}"
    ranks fsdp2_replicas 50 "$cupy" --front fsdp2 --world 4 --node-size 2 --replicas --schemes eden4
    section loss "$LIMIT" torch "$PYTHON" benchmarks/convergence.py --schemes eden4 --pairs 2 \
        --most-pairs 2 "${gpt[@]}" --out "$CACHE/convergence" --json "{json}"
    if cp "$CACHE/convergence/runs.jsonl" "$WORK" 2>/dev/null; then
        note "loss: finished runs are in runs.jsonl"
    fi
}

"part_$PART"
exit $FAILED
