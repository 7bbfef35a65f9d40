"""What people run beside serving: benchmarks, conversion, batch files, checks, evaluation, simulation."""
