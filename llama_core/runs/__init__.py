"""What people ask of a run's directory.

* ``loading``: its configuration and its plan, as it recorded them
* ``continuing``: which run to continue, from which step, and with which command
* ``checkpoints``: that of a step, the newest, the best, or several to average
* ``decay``: a run that branches off one of its checkpoints
* ``diagnosis``: its state, and how to go on
* ``stopping``: end its job
* ``export``: its weights as a folder of Hugging Face or PEFT
* ``console``: a line per step of the chain, and a progress bar
"""
