"""What a backend is: the interface, a base class to start from, the registry, the conformance suite.

The names of `interface` are here as well: its importers need numpy anyway.
"""

from hetrun.backend.interface import (
    FINISHED as FINISHED,
)
from hetrun.backend.interface import (
    FLOAT_BYTES as FLOAT_BYTES,
)
from hetrun.backend.interface import (
    Available as Available,
)
from hetrun.backend.interface import (
    Backend as Backend,
)
from hetrun.backend.interface import (
    Buffer as Buffer,
)
from hetrun.backend.interface import (
    Buffers as Buffers,
)
from hetrun.backend.interface import (
    Chosen as Chosen,
)
from hetrun.backend.interface import (
    Descriptor as Descriptor,
)
from hetrun.backend.interface import (
    Done as Done,
)
from hetrun.backend.interface import (
    Finished as Finished,
)
from hetrun.backend.interface import (
    Floats as Floats,
)
from hetrun.backend.interface import (
    Greatest as Greatest,
)
from hetrun.backend.interface import (
    Ints as Ints,
)
from hetrun.backend.interface import (
    OwnMemory as OwnMemory,
)
from hetrun.backend.interface import (
    Pass as Pass,
)
from hetrun.backend.interface import (
    PassShape as PassShape,
)
from hetrun.backend.interface import (
    Precision as Precision,
)
from hetrun.backend.interface import (
    Probe as Probe,
)
from hetrun.backend.interface import (
    ReadInto as ReadInto,
)
from hetrun.backend.interface import (
    Rows as Rows,
)
from hetrun.backend.interface import (
    Runner as Runner,
)
from hetrun.backend.interface import (
    SeesWhole as SeesWhole,
)
from hetrun.backend.interface import (
    Segment as Segment,
)
from hetrun.backend.interface import (
    SequencePart as SequencePart,
)
from hetrun.backend.interface import (
    Unavailable as Unavailable,
)
from hetrun.backend.interface import (
    Use as Use,
)
from hetrun.backend.interface import (
    WeightUse as WeightUse,
)
from hetrun.backend.interface import (
    looks_up as looks_up,
)
from hetrun.backend.interface import (
    sees_whole as sees_whole,
)
from hetrun.backend.interface import (
    slots_of as slots_of,
)
from hetrun.backend.interface import (
    slotted as slotted,
)
from hetrun.backend.interface import (
    use_of as use_of,
)
from hetrun.backend.interface import (
    writes_rows as writes_rows,
)
