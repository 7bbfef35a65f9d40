"""What the operating system and the hardware say, and safe ways to use files, threads and processes.

Cores (`cpu_topology`, `core_sets`, `thread_affinity`), limits of containers (`cgroups`, `sysfs`), memory
that is free (`memory_info`); opening a file that the user named (`files`) and knowing it again
(`file_identity`); child processes (`subprocesses`); what packages registered (`entry_points`); numbers
and text for people (`units`, `terminal_text`).
"""
