"""`hetrun bench --serve`: servers under load, ours and the peer's."""
