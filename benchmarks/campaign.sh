#!/bin/sh
# Runs the campaign, one table after the other, into runs/campaign. Safe to start again: what is finished stays, what was
# begun goes on at its last checkpoint. Needs FEDKEEP_DATA, and fedkeep on the path or its name in FEDKEEP.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${FEDKEEP_DATA:?names the folder of data sets}"
fedkeep=${FEDKEEP:-fedkeep}
export OMP_NUM_THREADS=1 FEDKEEP_CACHE="${FEDKEEP_CACHE:-$PWD/runs/cache}"
mkdir -p runs/campaign
exec 9> runs/campaign/.lock
flock -n 9 || { echo "the campaign is running already" >&2; exit 1; }

run() {
    echo "$(date -u +%FT%TZ) begins: $*"
    # One float32 thread each, and no stacks: the same bits every day.
    $fedkeep reproduce "$@" --out runs/campaign --workers "${WORKERS:-2}" --stack 1 --quiet \
        && echo "$(date -u +%FT%TZ) finished: $*" || echo "$(date -u +%FT%TZ) FAILED: $*"
}

# a. FedDCL's heads, and the baselines of its table 1 that run here.
# Prototypes and images are kept: one method of each seed first, so that no two look for the same at once.
run fedkeep/campaign-feddcl --columns paper --methods "FedDCL joint"
run fedkeep/campaign-feddcl --columns paper
run feddcl/table1 --columns grey-0.5 --methods FedAvg,FedEWC,FedLwF-2T --seeds 0,1 --set model.name=lenet5
run fedkeep/campaign-feddcl --columns disjoint --methods "FedDCL joint"
run fedkeep/campaign-feddcl --columns disjoint
# b. SFedKD on Fashion-MNIST.
run fedkeep/campaign-sfedkd --columns fashion-mnist-2-0.5
run fedkeep/campaign-sfedkd --columns fashion-mnist-2-0.5-parts
run fedkeep/campaign-sfedkd --columns fashion-mnist-2-10
# c. FedADKD's single term.
run fedkeep/campaign-fedadkd --columns cifar10-2 --methods "FedNTD,FedADKD single term x3"
run fedkeep/campaign-fedadkd --columns cifar10-2 --methods "FedADKD single term" --seeds 0
run fedkeep/campaign-fedadkd --columns cifar10-1-9 --methods "FedNTD,FedADKD single term x3"
# d. SFedKD on CIFAR-10.
run fedkeep/campaign-sfedkd --columns cifar10-2-10
# e. FedSKF.
run fedkeep/campaign-fedskf --columns cifar100-30-3x10
run fedkeep/campaign-fedskf --columns cifar100-30-3x10-without
# f. FedCAD.
run fedkeep/campaign-fedcad
echo "$(date -u +%FT%TZ) all finished"
