"""Truth: each architecture, wherever and however it runs, says what transformers says.

`python -m tests.truth` makes the whole table, `pytest tests/truth` a sample of it.
"""
