#!/bin/sh
# Plays what is timed against other engines, in one go of at most LIMIT seconds (1,500): for a quiet machine.
# What matters most comes first, a part that would not end in time is left out, and each is written when it is over.
# Needs FEDKEEP_DATA with Fashion-MNIST and CIFAR-10. PYTHON: the interpreter; CACHE: the peers' environments; OUT: the
# folder of the results, which stand in benchmarks/ by default; NOTE: what else ran on the machine.
# Afterwards: `python benchmarks/peers --pages` writes the table of benchmarks/README.md.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${FEDKEEP_DATA:?names the folder of data sets}"
python=${PYTHON:-python} cache=${CACHE:-$PWD/.venv-peers} out=${OUT:-$PWD/benchmarks} note=${NOTE:-}
begun=$(date +%s) limit=${LIMIT:-1500}
mkdir -p "$out/peers" "$cache"
# A new table begins with what is known of the other workloads.
[ -f "$out/peers/results.json" ] || cp benchmarks/peers/results.json "$out/peers/"
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1 FEDKEEP_CACHE="$cache/decoded"

part() { # seconds that it takes, its name, its command
    needs=$1 name=$2
    shift 2
    if [ $(($(date +%s) - begun + needs)) -gt "$limit" ]; then
        echo "$(date -u +%T) $name is left out: no time"
        return
    fi
    "$python" "$@" --note "$note" > "$out/$name.log" 2>&1 || echo "FAILED: $* (see $out/$name.log)"
    echo "$(date -u +%T) $name"
}

peers() { # seconds, workload, options
    needs=$1 name=$2
    shift 2
    part "$needs" "$name" benchmarks/peers --workloads "$name" --keep --cache "$cache" --out "$out/peers" "$@"
}

echo "$(date -u +%T) begins; load $(cut -d' ' -f1 /proc/loadavg 2>/dev/null)"
peers 180 w1-mlp --cycles 9 --seconds 15 --parts
peers 270 w1-lenet5 --cycles 9 --seconds 15 --parts
peers 150 w5-10 --cycles 6 --seconds 15 --parts
peers 330 w5-100 --cycles 3 --seconds 24
part 120 answers benchmarks/answers.py --repetitions 3 --out "$out/answers.md"
peers 330 w3 --cycles 3 --seconds 18
part 90 second_core benchmarks/second_core.py --rounds 5 --data-dir "$FEDKEEP_DATA" --out "$out/second_core.md"
peers 180 w2-sfedkd --cycles 3 --seconds 18
peers 180 w2-fedavg --cycles 6 --seconds 18
peers 180 w2-fedseq --cycles 6 --seconds 18
peers 120 w4 --cycles 20 --seconds 10
part 240 cohorts benchmarks/peers/cohorts.py --cohorts 10 100 1000 --cycles 6 --cache "$cache" --out "$out/peers/cohorts.md"
