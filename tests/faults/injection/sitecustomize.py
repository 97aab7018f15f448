"""Injects one fault into the processes of a run, without a change in their code.

Python imports this module in every process that has its folder in PYTHONPATH. The variable INJECTED_FAULT holds a
``Fault`` of ``faulty_run.py`` as JSON. The function that stands for the fault's phase is wrapped as soon as its module
is imported. A process whose module has no such function ends with one line.
"""

import functools
import importlib.util
import json
import os
import signal
import sys
import time

PROGRAMS = {"worker": "llama_core.launch.rank.worker", "supervisor": "submitit.core._submit"}
"""The modules that the processes of a rank run."""
BEGINS_STEP = ("llama_core.training.trainer", "Trainer._begin_step")


class Injector:
    """The fault in one process.

    Args:
        fault: the fields of a ``Fault``.
    """

    def __init__(self, fault):
        self.fault = fault
        self.rank = int(os.environ.get("SUBMITIT_LOCAL_GLOBALID", "-1"))
        self.step = 0
        """The step that has begun last."""
        self.begun = 0
        """How many times a step has begun; after a rollback, a step begins again."""
        self.acted_in = set()
        """The values of ``begun`` at which the fault has acted."""

    def is_due(self, arguments):
        """Return whether to act at a call with these arguments."""
        fault = self.fault
        has_argument = not fault["argument"] or any(str(one).endswith(fault["argument"]) for one in arguments)
        again = self.begun in self.acted_in or len(self.acted_in) >= fault["times"]
        again = again and not fault["action"].get("lasts")
        return self.step >= fault["step"] and has_argument and not again

    def act(self, result=None, arguments=()):
        """Leave the proof, then do what the fault does; return what the call with these arguments is to return."""
        self.acted_in.add(self.begun)
        with open(f"{self.fault['proof']}-{self.rank}", "a") as proof:  # noqa: PTH123 (as little as possible is imported)
            proof.write(json.dumps({"rank": self.rank, "pid": os.getpid(), "step": self.step}) + "\n")
        action = self.fault["action"]
        for _ in range(action.get("count", 1) if "signal" in action else 0):
            target = os.getppid() if action.get("to") == "supervisor" else os.getpid()
            os.kill(target, signal.Signals[action["signal"]])
            time.sleep(0.005)  # the kernel holds one signal of a kind
        os.environ.update(action.get("environment", {}))
        time.sleep(action.get("sleep", 0))
        if "errno" in action:
            raise OSError(action["errno"], os.strerror(action["errno"]), *action.get("path", ()))
        if "raise" in action:
            raise RuntimeError(action["raise"])
        if "flip" in action:
            flip_bit(arguments[0].param_groups[0]["params"][0], action["flip"])
        return result * float(action["factor"]) if "factor" in action else result

    def wrapped(self, function):
        """Return a function that also acts."""
        acts_after = self.fault["after"] or "factor" in self.fault["action"]

        @functools.wraps(function)
        def call(*args, **kwargs):
            due = self.is_due([*args, *kwargs.values()])
            if due and not acts_after:
                self.act(arguments=args)
            result = function(*args, **kwargs)
            return self.act(result, args) if due and acts_after else result

        return call

    def counting(self, begin_step):
        """Return a ``Trainer._begin_step`` that counts."""

        @functools.wraps(begin_step)
        def call(trainer, may_update):
            self.step, self.begun = trainer.step + 1, self.begun + 1
            return begin_step(trainer, may_update)

        return call


def flip_bit(parameter, bit):
    """Flip a bit of the first number of a parameter, which is fp32 and whole."""
    import torch

    parameter.detach().view(torch.int32).view(-1)[:1] ^= 1 << bit


class Wrapping:
    """Finds modules as Python does, and wraps functions of some once they are there.

    Args:
        wrappers: by module, then by the function's name in it.
    """

    def __init__(self, wrappers):
        self.wrappers = wrappers

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module that has a function to wrap."""
        wrappers = self.wrappers.pop(name, None)
        if wrappers is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_wrap(module):
            run(module)
            for function, wrapper in wrappers.items():
                wrap(module, function, wrapper)

        spec.loader.exec_module = run_and_wrap
        return spec


def wrap(module, name, wrapper):
    """Replace a function or method of a module."""
    *owners, last = name.split(".")
    owner = functools.reduce(getattr, owners, module)
    setattr(owner, last, wrapper(getattr(owner, last)))


def install(fault):
    """Prepare the fault in this process, if it is one that the fault is for."""
    program = next((name for name, module in PROGRAMS.items() if module in sys.orig_argv), None)
    injector = Injector(fault)
    if program != fault["process"] or (fault["rank"] is not None and injector.rank != fault["rank"]):
        return
    if fault["function"] is None:  # the first moment of the process
        injector.act()
        return
    module, function = fault["function"]
    wrappers = {module: {function: injector.wrapped}}
    if program == "worker":
        begins = wrappers.setdefault(BEGINS_STEP[0], {})
        begins[BEGINS_STEP[1]] = injector.counting
    sys.meta_path.insert(0, Wrapping(wrappers))


if "INJECTED_FAULT" in os.environ:
    install(json.loads(os.environ["INJECTED_FAULT"]))
