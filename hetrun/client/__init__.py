"""The contract of front ends, and the ways to reach an engine: in this process, in a worker, over HTTP.

Requests, events and queries are plain data that can cross a pipe. The engine implements the contract, front
ends use it, and neither imports the other.
"""
