"""What comes and goes with the recorded work of a pass, and where it waits on the host."""
