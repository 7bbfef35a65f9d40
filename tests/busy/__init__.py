"""What has a limit of time or a prediction, while other programs use the cores: `python -m tests.busy`.

`rig` has the server and the commands, `checks` what is asked of them, `table` what became of it.
"""
