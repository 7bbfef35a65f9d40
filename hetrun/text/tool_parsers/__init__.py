"""Tool calls in what a model writes: found while the text comes, and forced where a request wants one.

Each family of models writes calls in a way of its own. `formats` has a row for each and knows them by their
chat templates; `reader` is the state of one answer; `jsoncalls`, `namedcalls` and `tagged` read calls;
`forced` says how calls would have to be written, for a grammar (ADR 0035).

The process that runs templates does not import this.
"""
