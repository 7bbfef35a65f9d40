"""Plans for a device with memory of its own beside the CPU: what lies where, and who computes."""
