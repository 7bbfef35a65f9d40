"""Facts of a device that are measured when they first matter, and kept."""
