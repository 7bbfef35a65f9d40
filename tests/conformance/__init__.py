"""Every op on every available backend, compared with the reference."""
