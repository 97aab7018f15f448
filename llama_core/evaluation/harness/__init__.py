"""Tasks of lm-evaluation-harness.

* ``named_tasks``: tasks are found by their names, and run on a model
* ``model``: our model, as the harness asks it
* ``task_folder``, ``task_data``: a folder of tasks and its data sets, read without executing anything
* ``task_code``: does an installed task execute text?
* ``limits``: what the harness may do while it runs somebody's tasks, and for how long
"""
