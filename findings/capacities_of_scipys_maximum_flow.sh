#!/usr/bin/env bash
# SciPy's maximum_flow takes capacities of 64-bit integers and drops their upper 32 bits, without a message.
#
# Version: SciPy 1.17.1. Seen on 2026-11-30.
# Guess: edges may carry bytes, so a capacity of 3 GB is a capacity of 3 GB, or a ValueError, as a capacity of 1.5 is.
# Seen: the maximum flow through an edge of 3 GB is 0, and through one of 4 GiB and 8 bytes it is 8. Capacities become 32-bit integers,
# which wrap, so a minimum cut may be any cut. Flows themselves are added in 64 bits: two edges of 2 GiB less one byte have the right sum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet scipy==1.17.1
"$folder/venv/bin/python" -W error - <<'PY'
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow


def flow(capacities):
    """The maximum flow from 0 to 1 along paths of two edges, each path by its capacity."""
    graph = np.zeros((len(capacities) + 2,) * 2, dtype=np.asarray(capacities).dtype)
    graph[0, 2:] = graph[2:, 1] = capacities
    return int(maximum_flow(csr_array(graph), 0, 1).flow_value)


for capacities in ([2**31 - 1], [2**31 - 1] * 2, [3 * 10**9], [2**32 + 8], [3 * 10**9, 5]):
    print("capacities", capacities, "give a flow of", flow(capacities))
assert flow([2**31 - 1] * 2) == 2 * (2**31 - 1)
assert (flow([3 * 10**9]), flow([2**32 + 8]), flow([3 * 10**9, 5])) == (0, 8, 5)
try:
    flow([1.5])
except ValueError as error:
    print("capacities [1.5]:", error)
else:
    raise AssertionError("a capacity of 1.5 was taken")
PY
