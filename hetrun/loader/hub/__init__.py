"""Models that have names: on Hugging Face's hub, and in what other programs keep on this machine.

`names.py` reads names, `select.py` says which files of a repository make a model, `download.py` brings them
into Hugging Face's cache, `stores.py` looks into what is on this machine, `resolve.py` gives a path for any
name, `remove.py` takes a model away.
"""
