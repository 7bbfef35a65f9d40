#!/usr/bin/env bash
# For a nightly job: everything that `make test` leaves out, on a checkout of its own. The log and a line of JSON for each
# run stay in the folder of the first argument (default: nightly/).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

results=${1:-nightly}
mkdir -p "$results"
log=$results/$(date +%Y-%m-%d).log
make test-all ARGS="--log $results/runs.jsonl" >"$log" 2>&1
status=$?
tail -n 3 "$log"
exit $status
