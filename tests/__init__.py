"""The tests of modtrace; see README.md."""

import os

# Before torch is imported. Threads of OpenMP that have nothing to do would spin for some ms behind each operator, where
# other processes of the tests could run.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
