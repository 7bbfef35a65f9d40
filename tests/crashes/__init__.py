"""Crashes: kill -9 and power cuts, at any point of whatever writes files of the user's.

`recorder.c` stands before the C library, writes down each call that changes a file, and can kill the process
at one of them. `disk` makes of that log the states that a power cut may leave. `operations` are what is cut
short, and how each is judged afterwards, in another process (`child`).
`python -m tests.crashes` prints a table.
"""
