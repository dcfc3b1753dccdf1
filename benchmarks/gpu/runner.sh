# Sections of a part of benchmarks/gpu_suite.sh, one after the other under one deadline. Sourced; the
# caller sets PART, OUT (results), WORK (logs and figures, emptied first), SECONDS_LEFT and PYTHON.
#
# summary_PART.txt is written before the first section and after every one, with PART.tar.gz of all
# logs and figures, so that a part that is killed leaves what it has found.

SUMMARY="$OUT/summary_$PART.txt"
END=$((SECONDS + SECONDS_LEFT))
FAILED=0
rm -rf "$WORK" && mkdir -p "$WORK" && : >"$SUMMARY"

# missing NEEDS...: the Python packages and programs among them that this machine lacks
missing() {
    local name lacking=()
    for name in "$@"; do
        command -v "$name" >/dev/null || "$PYTHON" -c "import importlib.util, sys
sys.exit(importlib.util.find_spec('$name') is None)" || lacking+=("$name")
    done
    echo "${lacking[*]}"
}

# note TEXT...: add lines to the summary, and pack everything anew
note() {
    printf '%s\n' "$@" | tee -a "$SUMMARY"
    cp "$SUMMARY" "$WORK" && tar -C "$WORK" -czf "$OUT/$PART.part" . &&
        mv "$OUT/$PART.part" "$OUT/$PART.tar.gz"
}

# section NAME SECONDS "NEEDS" COMMAND...: run it for at most SECONDS and end all its processes. In
# COMMAND, {json} stands for the file of its figures and {limit} for the seconds that it has.
section() {
    local name="$1" limit="$2" lacking start=$SECONDS code word command=() verdict
    lacking="$(missing $3)"
    shift 3
    [ "${DRY:-0}" = 1 ] && limit=$((3 * limit)) # on a CPU that others may use
    ((limit > END - SECONDS)) && limit=$((END - SECONDS))
    if [ -n "$lacking" ]; then
        note "$name: needs $lacking"
    elif ((limit < 5)); then
        note "$name: no time left"
    else
        for word in "$@"; do
            word="${word//\{json\}/$WORK/$name.json}"
            command+=("${word//\{limit\}/$((limit - 5))}")
        done
        echo "== $name (at most $limit s)" | tee "$WORK/running"
        timeout --kill-after=5 "$limit" "${command[@]}" >"$WORK/$name.log" 2>&1
        code=$?
        rm "$WORK/running"
        case $code in
            0) verdict=passed ;;
            124 | 137) verdict="time limit" ;;
            *) verdict="failed ($code)" ;;
        esac
        [ "$code" -eq 0 ] || FAILED=1
        note "$name: $verdict, $((SECONDS - start)) s" \
            "$(tail -n "$([ "$code" -eq 0 ] && echo 12 || echo 40)" "$WORK/$name.log" | cut -c1-300)"
    fi
}
