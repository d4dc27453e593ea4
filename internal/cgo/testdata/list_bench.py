"""Prints the nanoseconds that NIXL's Python API takes to make a transfer descriptor list of
N descriptors from a numpy array: the median of several fillings, in one process."""
import os
import statistics
import sys
import time

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

n = int(sys.argv[1])
agent = nixl_agent(f"list-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
addresses = np.arange(n, dtype=np.uint64) * 4096 + (1 << 40)
descs = np.stack([addresses, np.full(n, 4096, np.uint64), np.zeros(n, np.uint64)], axis=1)
times = []
for _ in range(21):
    start = time.perf_counter_ns()
    agent.get_xfer_descs(descs, "DRAM")
    times.append(time.perf_counter_ns() - start)
print(int(statistics.median(times)))
