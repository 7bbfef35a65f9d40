"""The contract of front ends, and the ways to reach an engine: in this process, in a worker, over HTTP.

Requests (`events.GenerateRequest`, `sampling_params`), `events` and `queries` are plain data that can
cross a pipe. `interface.ChatClient` is the contract; `engine_client` has an engine here or in a worker
process (`worker_main` runs in it, `worker_process` and `worker_supervisor` manage it, `wire_protocol`
defines their messages), `http_client` reaches a running server, `model_pool` manages several models.
The engine implements the contract, front ends use it, and neither imports the other. `hooks` defines
the events for plugins.
"""
