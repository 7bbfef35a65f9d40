"""What people run beside serving: benchmarks, conversion, batch files, checks, evaluation, simulation.

One module or package for each command: `bench/`, `convert/`, `batch/` (`hetrun run -f`), `simulate/`
(`hetrun plan --machine`), `check_model`, `doctor`, `evaluate` (KL against float32), `model_summary`
(`hetrun inspect`).
"""
