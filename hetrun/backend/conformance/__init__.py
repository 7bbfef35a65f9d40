"""The conformance table: every kind of op, with weights of every type, on a backend and on the reference.

What a backend must compute is in `cases.py`, one case computed and compared is `runner.py`. Of all backends
here `report.py` makes the table that `hetrun devices --conformance` prints; `faults` is for one backend and
what one model needs of it.
"""
