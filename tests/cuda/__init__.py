"""What only a machine with a GPU can tell: `python -m tests.cuda`, and the tests in this folder.

`pack` gathers, on a machine with a compiler and a network, what a machine without may lack; `check` says what
is missing there; `conformance`, `speed` and `beyond` take some minutes each and print a table.
"""
