"""A model's forward step as data: weights, ops, graphs, quantization types, and rewrites of them.

The names of `ir` are here as well: its importers need numpy anyway.
"""

from hetrun.graph.ir import (
    Architecture as Architecture,
    Constant as Constant,
    Extent as Extent,
    Graph as Graph,
    GraphBuilder as GraphBuilder,
    KvShape as KvShape,
    Leaves as Leaves,
    ModelMeta as ModelMeta,
    Op as Op,
    Part as Part,
    PredictionBlock as PredictionBlock,
    Predicts as Predicts,
    ReadExtent as ReadExtent,
    Remade as Remade,
    Rows as Rows,
    StateShape as StateShape,
    Value as Value,
    Weight as Weight,
    WeightSource as WeightSource,
    constant as constant,
    in_scope as in_scope,
    kept_by as kept_by,
    kv_shapes as kv_shapes,
    spelled as spelled,
    stack as stack,
    states_of as states_of,
)
