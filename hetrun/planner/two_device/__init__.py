"""Plans for a device with memory of its own beside the CPU: what lies where, and which side computes what."""
