"""States of a fixed size on a GPU: where they lie there, and the layers that keep them."""
