"""Answers with tools and thoughts: which tools there are, what the grammar must enforce, how text is read.

The server and the Python API share this. It takes plain values: no requests, no events.
"""
