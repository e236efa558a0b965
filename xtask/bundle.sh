#!/usr/bin/env bash
# Runs the programs of this folder; writes their output to OUT. Usage: run.sh OUT [STEP ...]
# Steps, default all: doctor generate tests cache sanitizers benches. If PYTHON is an interpreter with torch, benches also time peers.
set -uo pipefail
cd "$(dirname "$0")"
out=${1:?"usage: run.sh OUT [STEP ...]"}
steps=${*:2}
mkdir -p "$out"
failed=0
tar -xzf programs.tar.gz

# The properties of the device.
doctor() {
    ./tilewright doctor >"$out/doctor.txt" 2>&1 || failed=1
}

# The same tokens on the CPU and on the GPU.
generate() {
    for device in cpu cuda; do
        ./tilewright generate --model models/tilewright-small --device $device --quiet --temperature 0 --max-tokens 64 \
            "It was a dark night, and" >"$out/generate.$device.txt" 2>"$out/generate.$device.err" || failed=1
    done
    cmp "$out/generate.cpu.txt" "$out/generate.cuda.txt" || failed=1
}

tests() {
    for test in test_*; do
        "./$test" --nocapture >"$out/$test.txt" 2>&1 || failed=1
        echo "$test: $(grep "^test result" "$out/$test.txt")"
    done
}

# 64 concurrent processes on an empty cache, then 200 that are killed while they compile other kernels. Processes that exit
# normally, and one more at the end, compare their first batch with the CPU's.
cache() {
    folder=$(mktemp -d)
    first_batch() { ./bench_first_use --child "$folder" "$@"; }
    pids=()
    for _ in $(seq 64); do
        first_batch >>"$out/cache.txt" 2>&1 &
        pids+=($!)
    done
    right=0
    for pid in "${pids[@]}"; do wait "$pid" && right=$((right + 1)); done
    echo "64 processes at once: $right right"
    for number in $(seq 200); do
        ./bench_first_use --child "$folder" --slope "0.$number" >>"$out/cache.txt" 2>&1 &
        sleep "0.$((RANDOM % 900 + 100))"
        kill -9 $! && killed=$((${killed:-0} + 1))
        wait $!
    done 2>/dev/null
    first_batch >>"$out/cache.txt" 2>&1 && first_batch --slope 0.1 >>"$out/cache.txt" 2>&1 && after=right
    echo "200 processes, ${killed:-0} killed, then: ${after:-wrong}; $(find "$folder" -type f | wc -l) files in the cache"
    [ "$right ${after:-wrong}" = "64 right" ] || failed=1
}

# Runs a test under a tool; fails if the tool or the test reports an error, or the test does not exist.
sanitize() {
    tool=${1%% *}
    what=${1#* }
    said="$out/$(echo "$what" | tr ' :' '__').$tool.txt"
    # API errors are expected: cuFuncGetParamInfo returns one after the last parameter.
    # shellcheck disable=SC2086
    compute-sanitizer --error-exitcode 9 --report-api-errors no --tool "$tool" ./test_$what >"$said" 2>&1
    status=$?
    grep -q "^test result: ok. [1-9]" "$said" || status=1
    echo "$tool, $what: $status, $(grep "ERROR SUMMARY\|RACECHECK SUMMARY" "$said" | tail -n 1)"
    return $status
}

# One test per kind of kernel, six in parallel.
sanitizers() {
    export -f sanitize
    export out
    for tool in memcheck racecheck synccheck; do
        while read -r what; do printf '%s\0' "$tool $what"; done <<'END'
@SANITIZED@
END
    done | xargs -0 -P 6 -I '{}' bash -c 'sanitize "$1"' _ '{}' || failed=1
}

benches() {
    for bench in attention kernels; do
        # shellcheck disable=SC2086
        "./bench_$bench" --record "$out/$bench.csv" ${PYTHON:+--peer $PYTHON} 2>&1 | tee "$out/bench_$bench.txt"
    done
    for bench in first_use plan; do
        "./bench_$bench" --record "$out/$bench.csv" 2>&1 | tee "$out/bench_$bench.txt"
    done
    ./bench_small 2>&1 | tee "$out/bench_small.txt"
}

for step in ${steps:-doctor generate tests cache sanitizers benches}; do
    echo "== $step"
    $step
done
exit $failed
