"""Decides which backend runs what, with how many threads, and why: functions over data, nothing runs here.

`plan.PlanSet` is the decision, with a plan for each bucket of tokens. `static` decides by a fixed order,
`online` by measured costs (`costmodel/`, `segment_cost`) over a chain of units (`shortest_path`,
`residency`, `milp`), `two_device/` for a device beside the CPU, `plugin_planners` asks packages. `trials`
says what to measure.
"""
