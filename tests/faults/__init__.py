"""Every Nth failure: whatever a process asks of the system is refused once, call after call.

`faults.c` stands before the C library in a process of its own, counts the calls of an operation
(`operations`), and fails one of them. After each the operation must have given what it gives otherwise or one
clear error, nothing may be left behind, and the next time it must give what it always gives (`child`).
`python -m tests.faults OPERATION CALL` tries one pair and prints a table.
"""
