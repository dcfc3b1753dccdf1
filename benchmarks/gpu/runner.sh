# Runs the sections of a call of benchmarks/gpu_suite.sh one by one, under one deadline. Sourced;
# the caller sets PART, OUT (results), WORK (logs and figures, emptied first), SECONDS_LEFT and
# PYTHON.
#
# summary_PART.txt and PART.tar.gz, with all logs and figures, are replaced after every section, so
# that a call that is killed leaves its results.

SUMMARY="$OUT/summary_$PART.txt"
END=$((SECONDS + SECONDS_LEFT))
FAILED=0
rm -rf "$WORK" && mkdir -p "$WORK" && : >"$SUMMARY"

# missing NEEDS...: print the Python packages and programs that this machine lacks
missing() {
    local name lacking=()
    for name in "$@"; do
        command -v "$name" >/dev/null || "$PYTHON" -c "import importlib.util, sys
sys.exit(importlib.util.find_spec('$name') is None)" || lacking+=("$name")
    done
    echo "${lacking[*]}"
}

# note TEXT...: add lines to the summary and replace the archive
note() {
    printf '%s\n' "$@" | tee -a "$SUMMARY"
    cp "$SUMMARY" "$WORK" && tar -C "$WORK" -czf "$OUT/$PART.part" . &&
        mv "$OUT/$PART.part" "$OUT/$PART.tar.gz"
}

# section NAME SECONDS "NEEDS" COMMAND...: run the command for at most SECONDS, then end all of its
# processes. In COMMAND, {json} is replaced by the file of its figures, {limit} by its seconds.
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
