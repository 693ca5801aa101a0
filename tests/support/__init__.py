"""Shared by the tests of several rooms: data, programs, conformance classes."""

import os

# Each program that tests start imports numpy, which makes threads for matrices that no test has:
# a command of 0.16 s of CPU took 0.25. Here, since it must come before numpy.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Until what hangs is given up, or ended. Nothing takes near as long, however busy the machine is: a
# test fails by what it finds, and never by how long that took.
LIMIT_S = 600
