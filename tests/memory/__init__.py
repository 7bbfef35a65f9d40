"""Every documented mode in a control group of just its budget, with swap off: no kill, and the right answer.

`group` makes the control groups of both versions, `models` the models, `modes` says what is run and with how
much memory, `trial` runs each without and with the group, and `soak` looks for growth over an hour.
`python -m tests.memory` prints the table.
"""
