#!/bin/sh
# Plays everything that is timed against other engines or processes, in one go of some 25 minutes: for a quiet machine.
# What matters most comes first, and each part is written when it is over, so that a run that is ended loses one part.
# Needs FEDKEEP_DATA with Fashion-MNIST and CIFAR-10. PYTHON: the interpreter; CACHE: the peers' environments; OUT: the
# folder of the results, which stand in benchmarks/ by default; NOTE: what else ran on the machine.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${FEDKEEP_DATA:?names the folder of data sets}"
python=${PYTHON:-python} cache=${CACHE:-$PWD/.venv-peers} out=${OUT:-$PWD/benchmarks} note=${NOTE:-}
mkdir -p "$out/peers" "$cache"
# A new table begins with what is known of the other workloads.
[ -f "$out/peers/results.json" ] || cp benchmarks/peers/results.json "$out/peers/"
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1 FEDKEEP_CACHE="$cache/decoded"

peers() {
    "$python" benchmarks/peers --keep --cache "$cache" --out "$out/peers" --note "$note" "$@" > "$out/$2.log" 2>&1 \
        || echo "FAILED: peers $* (see $out/$2.log)"
    echo "$(date -u +%T) $2"
}

echo "$(date -u +%T) begins; load $(cut -d' ' -f1 /proc/loadavg 2>/dev/null)"
peers --workloads w1-mlp --cycles 12 --seconds 15
peers --workloads w1-lenet5 --cycles 12 --seconds 15
"$python" benchmarks/second_core.py --rounds 12 --data-dir "$FEDKEEP_DATA" --note "$note" --out "$out/second_core.md" \
    > "$out/second_core.log" 2>&1 || echo "FAILED: second_core.py (see $out/second_core.log)"
echo "$(date -u +%T) second_core"
peers --workloads w3 --cycles 6 --seconds 18
peers --workloads w2-sfedkd --cycles 6 --seconds 18
peers --workloads w2-fedavg --cycles 12 --seconds 18
"$python" benchmarks/peers/cohorts.py --cohorts 10 100 1000 --cycles 6 --seconds 30 --cache "$cache" --note "$note" \
    --out "$out/peers/cohorts.md" > "$out/cohorts.log" 2>&1 || echo "FAILED: cohorts.py (see $out/cohorts.log)"
echo "$(date -u +%T) cohorts"
peers --workloads w2-fedseq --cycles 12 --seconds 18
peers --workloads w4 --cycles 20 --seconds 10
