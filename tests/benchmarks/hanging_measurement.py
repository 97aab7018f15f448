"""``python -m benchmarks.gpu`` with a stage that hangs, and without a look at the machine, which takes seconds."""

import sys

from benchmarks.gpu.measure import Measurement, main
from benchmarks.gpu.stages import STAGES, Stage

Measurement.recorded = lambda measurement, module, *_: {}
STAGES["hangs"] = Stage("hangs", 100, ("hanging_stage:never",))
sys.exit(main())
