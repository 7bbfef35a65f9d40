"""A model's forward step as data: weights, ops, graphs, quantization types, and rewrites of them.

The names of `ir` are here as well: its importers need numpy anyway.
"""

from hetrun.graph.ir import (
    Architecture as Architecture,
)
from hetrun.graph.ir import (
    Constant as Constant,
)
from hetrun.graph.ir import (
    Extent as Extent,
)
from hetrun.graph.ir import (
    Graph as Graph,
)
from hetrun.graph.ir import (
    GraphBuilder as GraphBuilder,
)
from hetrun.graph.ir import (
    KvShape as KvShape,
)
from hetrun.graph.ir import (
    Leaves as Leaves,
)
from hetrun.graph.ir import (
    ModelMeta as ModelMeta,
)
from hetrun.graph.ir import (
    Op as Op,
)
from hetrun.graph.ir import (
    Part as Part,
)
from hetrun.graph.ir import (
    PredictionBlock as PredictionBlock,
)
from hetrun.graph.ir import (
    Predicts as Predicts,
)
from hetrun.graph.ir import (
    ReadExtent as ReadExtent,
)
from hetrun.graph.ir import (
    Remade as Remade,
)
from hetrun.graph.ir import (
    Rows as Rows,
)
from hetrun.graph.ir import (
    StateShape as StateShape,
)
from hetrun.graph.ir import (
    Value as Value,
)
from hetrun.graph.ir import (
    Weight as Weight,
)
from hetrun.graph.ir import (
    WeightSource as WeightSource,
)
from hetrun.graph.ir import (
    constant as constant,
)
from hetrun.graph.ir import (
    in_scope as in_scope,
)
from hetrun.graph.ir import (
    kept_by as kept_by,
)
from hetrun.graph.ir import (
    kv_shapes as kv_shapes,
)
from hetrun.graph.ir import (
    spelled as spelled,
)
from hetrun.graph.ir import (
    stack as stack,
)
from hetrun.graph.ir import (
    states_of as states_of,
)
