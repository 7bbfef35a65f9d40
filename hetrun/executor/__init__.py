"""Runs plans: opens a model within its budget, computes steps, and keeps the plan good.

`planned_model.open_planned` opens a model (`loading/`: what is decided before weights are read),
`executor.Executor` computes a `Step`, `weight_store.WeightStore` has what each backend holds,
`stats.Stats` what was measured. `autotune/` probes, watches and plans anew; `library/` is for models that
a library runs as a whole; `interface.Model` is all that the engine sees.
"""
