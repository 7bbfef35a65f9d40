"""The test suite; what each folder needs stands in CONTRIBUTING.md."""

import os

# Before numpy is loaded: the matrices of tests are tiny, and threads of OpenBLAS that wait for each other
# beside those of ggml make the suite several times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
