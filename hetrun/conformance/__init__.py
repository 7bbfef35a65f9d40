"""The conformance table: every kind of op, with weights of every type, on a backend and on the reference.

What a backend must compute is in `table.py`, one case computed and compared is `running.py`. Of all backends
here `report.py` makes the table that `hetrun devices --conformance` prints; `faults` is for one backend and
what one model needs of it.
"""

from hetrun.conformance.vetting import Fault as Fault
from hetrun.conformance.vetting import Kind as Kind
from hetrun.conformance.vetting import faults as faults
