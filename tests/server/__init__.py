"""The HTTP server as an ASGI app, in process."""
