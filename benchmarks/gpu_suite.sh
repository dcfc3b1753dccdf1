#!/usr/bin/env bash
# All checks for a bare GPU machine without a network, in four parts.
#
#     benchmarks/gpu_suite.sh A [OUT]     # equality: the kernels' bytes, streams, launch overhead
#     benchmarks/gpu_suite.sh B [OUT]     # speed: layouts of stores, tables, sizes
#     benchmarks/gpu_suite.sh C [OUT]     # DeepSpeed with several ranks on one GPU
#     benchmarks/gpu_suite.sh D [OUT]     # memory and race checks of the kernels
#
# A part takes at most LIMIT seconds (540) and does not depend on the others. Its most important
# sections come first. After every section it replaces summary_A.txt and A.tar.gz, with all logs and
# figures, in OUT: the argument, else the variable of that name, else gpu_suite_out. Caches and
# installed wheels are in CACHE, outside OUT.
#
# Needs a Python with torch (CUDA), numpy and, for most sections, CuPy, pytest and hypothesis:
# PYTHON=/path/to/python. Other packages are installed from wheels in WHEELS (wheels/ in the
# checkout), which benchmarks/gpu/collect_wheels.sh collects on a machine with a network. A section
# names the packages that are missing. DRY=1 runs the same sections on the CPU at small sizes, to test
# this script. Exits with 1 if a section failed.
set -uo pipefail

ROOT="$(cd "$(dirname "$0")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
CACHE="${CACHE:-${TMPDIR:-/tmp}/ds_quant_gpu_suite_$(id -u)}"
WHEELS="${WHEELS:-$ROOT/wheels}"
mkdir -p "$CACHE" && CACHE="$(cd "$CACHE" && pwd)" || exit 1
OUT="${2:-${OUT:-gpu_suite_out}}"
OUT="$(mkdir -p "$OUT" && cd "$OUT" && pwd)" || exit 1

SITE="$CACHE/site"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$SITE" "$WHEELS"/*.whl || echo "gpu_suite.sh: wheels cannot be installed" >&2
fi
export PYTHONPATH="$ROOT:$ROOT/benchmarks:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$CACHE/cupy}" TRITON_CACHE_DIR="$CACHE/triton"
export TORCHINDUCTOR_CACHE_DIR="$CACHE/inductor" TORCH_EXTENSIONS_DIR="$CACHE/extensions"
cd "$ROOT" || exit 1

case "${1:-}" in
    A | B | C | D) PART="$1" WORK="$CACHE/work_$1" SECONDS_LEFT="${LIMIT:-540}" ;;
    *) echo "gpu_suite.sh: '${1:-}': allowed: A, B, C or D" >&2 && exit 2 ;;
esac
source benchmarks/gpu/runner.sh

if [ "${DRY:-0}" = 1 ]; then
    device=cpu size=1e5 small=1e4 large=1e5 tests=(--collect-only) workers=()
    cupy=torch pytest="torch pytest hypothesis"
    steps=3 width=64 schemes=(qsdp lossless_w_g3)
else
    device=cuda size=5e8 small=4096 large=2e9 tests=() workers=(-n 6 --dist worksteal)
    cupy="torch cupy" pytest="torch cupy pytest hypothesis"
    steps=20 width=2048 schemes=(full_precision qsdp sdp4bit zeropp lossless_w_g3 eden3)
fi
deepspeed="torch deepspeed pydantic"
# Without setup.cfg, which turns warnings of the development environment's versions into errors.
gpu_tests=("$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -W ignore -q
    tests/kernels/test_gpu.py "${tests[@]}")

kernels() { # NAME SECONDS OPTIONS...
    section "$1" "$2" "$cupy" "$PYTHON" benchmarks/kernels.py --device $device --json "{json}" \
        --limit "{limit}" "${@:3}"
}

sweep() { # NAME SECONDS
    section "$1" "$2" "$cupy" "$PYTHON" benchmarks/gpu/sweeps.py --sweep "$1" --device $device \
        --bytes $size --limit "{limit}" --json "{json}"
}

# Without torch.compile, which DeepSpeed uses for helpers: compiling them takes too long.
ranks() { # STAGE WORLD OPTIONS...
    section "zero$1_world$2" 90 "$deepspeed" env TORCHDYNAMO_DISABLE=1 "$PYTHON" \
        benchmarks/one_gpu.py --device $device --json "{json}" --stage "$1" --world "$2" \
        --steps $steps --width 128 --at-once $((12 / $2)) --schemes "${schemes[@]}" "${@:3}"
}

checker() { # TOOL SECONDS TESTS
    local tool=(compute-sanitizer --tool "$1" --error-exitcode 9) needs="$pytest compute-sanitizer"
    [ "${DRY:-0}" = 1 ] && tool=() needs="$pytest"
    section "$1" "$2" "$needs" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${tool[@]}" "${gpu_tests[@]}" \
        -x -k "$3"
}

# The machine, the bytes of the kernels, the overhead of a launch.
part_A() {
    [ "${DRY:-0}" = 1 ] || section driver 10 nvidia-smi nvidia-smi -q
    section doctor 50 "$deepspeed" "$PYTHON" -m ds_quant doctor --json --no-processes
    section equality 300 "$pytest" "${gpu_tests[@]}" "${workers[@]}"
    kernels overhead 40 --overhead
    kernels one_size 150 --min-bytes $large --max-bytes $large --dtypes bf16 --ways auto
}

# The speed of every layout, against a copy and the torch reference.
part_B() {
    sweep stores 120
    sweep tables 40
    sweep ragged 40
    sweep forms 40
    sweep priority 30
    kernels sizes 100 --min-bytes $small --max-bytes $large --dtypes bf16 --codecs int4 --ways auto
    # 32-byte sectors per load or store of a warp. Twice the necessary number: half sectors are used.
    local sectors=l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op metrics profiler=()
    metrics="gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed"
    metrics+=",sm__throughput.avg.pct_of_peak_sustained_elapsed,smsp__inst_executed.sum"
    metrics+=",${sectors}_ld.ratio,${sectors}_st.ratio"
    [ "${DRY:-0}" = 1 ] || profiler=(ncu --clock-control none --csv --metrics "$metrics"
        --kernel-name "regex:encode|decode_sum|recode")
    section counters 60 "$cupy ${profiler[0]:-}" "${profiler[@]}" "$PYTHON" benchmarks/gpu/sweeps.py \
        --sweep five --device $device --bytes $size
    kernels ways 100 --min-bytes $size --max-bytes $size --dtypes bf16
}

# DeepSpeed with several ranks on one GPU, and one of many ranks. Kernels are compiled first, because
# several processes would compile the same ones.
part_C() {
    local nodes=(--node-size 2 --accumulation 2)
    section precompile 60 "$deepspeed $cupy" env TORCHDYNAMO_DISABLE=1 "$PYTHON" \
        benchmarks/gpu/precompile.py --device $device --json "{json}" --schemes "${schemes[@]}"
    ranks 3 2
    ranks 2 2
    ranks 3 4 "${nodes[@]}"
    ranks 2 4 "${nodes[@]}"
    section world32 60 "$deepspeed" env TORCHDYNAMO_DISABLE=1 "$PYTHON" benchmarks/gpu/world.py \
        --ranks 32 --node-size 8 --device $device --width $width --json "{json}"
}

# Checks by compute-sanitizer. On a new machine every kernel is compiled first.
part_D() {
    local ragged="equal_the_reference and (g96 or g8192)" barriers="lossless_rows or gaussian"
    checker memcheck 250 "$ragged or many_codecs or recode or beside_encoded or $barriers"
    checker racecheck 250 "$ragged or way_of_storing or $barriers"
}

"part_$PART"
exit $FAILED
