"""What the operating system and the hardware say, and safe ways to use files, threads and processes."""
