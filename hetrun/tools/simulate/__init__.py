"""Machines that are not here: what a machine's description says about how fast a model would be on it.

Everything in this package is arithmetic on figures that were written down. It measures nothing and runs
nothing, and what it says is called a prediction wherever it is shown. The planner of this machine does not
read it: that one goes by what was measured.

`machine` and `machine_files` describe machines, `shapes` models without weights. `costs` says what the parts
of a layer take on one device, `layer_paths` what a layer takes on two, `evaluator` what a whole placement
(`types`) takes and fills. `policies` choose placements as the papers do, and as hetrun may; `report` shows
them.
"""
