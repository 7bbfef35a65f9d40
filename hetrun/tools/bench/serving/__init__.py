"""`hetrun bench --clients`: servers under load, ours and the peer's."""
