#!/usr/bin/env bash
# One rank of a test suite under horovodrun: rank 0 speaks, the others only when they fail.
set -uo pipefail
rank=${HOROVOD_RANK:-${OMPI_COMM_WORLD_RANK:-0}}
# The ranks would write one cache folder at the same time; Open MPI gives them a terminal that is none.
pytest=(python -m pytest -q --color=no -p no:cacheprovider)
if [[ $rank == 0 ]]; then
    exec "${pytest[@]}" "$@"
fi
said=$(mktemp)
trap 'rm -f "$said"' EXIT
"${pytest[@]}" "$@" > "$said" 2>&1 &
child=$!
# A rank that the launcher ends because another failed says how far it had come.
trap 'kill "$child" 2>/dev/null; wait "$child"; cat "$said"; exit 143' TERM INT
wait "$child"
code=$?
if ((code)); then cat "$said"; fi
exit "$code"
