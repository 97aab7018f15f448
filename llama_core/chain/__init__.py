"""The chain of a run: plan it, prepare it, run its steps.

* ``chain``: the order of the steps, the same for the command line, Prefect and Python
* ``steps``: the steps of a prepared run
* ``planned``, ``prepare``: its plan, then its directory
* ``downloads``, ``paths``, ``tokenize``: what it takes from the Hub, the paths of its data, its data as tokens
* ``environment``: can it start here?
* ``preview``: its plan and rehearsal, without a directory
* ``elastic``: a plan for the nodes that its job has got
* ``loader``: the chain on batches from the caller's own dataloader
* ``announcements``, ``batch``, ``expected``, ``samples``: what the chain says
"""
