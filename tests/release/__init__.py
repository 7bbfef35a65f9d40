"""The release gate: `make release`, or `python -m tests.release`.

`steps` lists its lines; `gate` runs them and keeps what came of each; `speed` measures the figures that
`figures` writes into the README; `checklist` is the page that a release is signed with.
"""
