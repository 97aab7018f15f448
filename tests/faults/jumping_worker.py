"""A worker of which one rank's clock is set in the third step: ``jumping_worker.py RANK SECONDS END RUN_DIR [...]``.

The rank is killed in the step END; 0: it is not.
"""

import datetime
import os
import signal
import sys
import time

from llama_core.launch.rank import worker
from llama_core.records import files
from llama_core.training.trainer import Trainer

rank, seconds, end, *arguments = sys.argv[1:]
read, begin_step = time.time, Trainer._begin_step
offset = 0.0


class JumpingDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=offset)


def begin_and_jump(trainer, may_update):
    global offset  # noqa: PLW0603
    if trainer.step >= 2:
        offset = float(seconds)
    if trainer.step + 1 == int(end):
        os.kill(os.getpid(), signal.SIGKILL)
    return begin_step(trainer, may_update)


if os.environ["RANK"] == rank:
    time.time = lambda: read() + offset
    files.datetime = JumpingDatetime
    Trainer._begin_step = begin_and_jump
sys.exit(worker.main(arguments))
