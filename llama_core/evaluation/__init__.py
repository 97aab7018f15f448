"""Questions about weights: their loss on data, their scores on tasks of lm-evaluation-harness, and texts they write.

* ``questions``: a question is asked of one checkpoint after another
* ``held_out``, ``tasks``: the questions, whose answers are losses and scores; ``harness/`` has the tasks
* ``generate``, ``conversation``: a text that is continued, and a conversation
* ``inference/``: the model computes, on one device or divided among several
* ``ranks``, ``worker``: how the ranks of an evaluation are started, and what one of them does
* ``plan``: where checkpoints are evaluated, and how devices share it
* ``evaluator``, ``jobs``: the checkpoints of a run while it trains, each in a process or a job of its own
* ``recording``, ``score_trackers``: scores go into the run's directory, and to its trackers
"""
