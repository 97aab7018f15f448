"""Questions about finished weights: losses on held-out texts, tasks of lm-evaluation-harness, and texts they generate.

``questions`` asks one of checkpoint after checkpoint. ``held_out``, ``tasks`` and ``generate`` answer, in this process
or in the ranks that ``ranks`` starts (``worker``). ``plan`` says how devices share a model. ``evaluator`` evaluates the
checkpoints of a run while it trains, in the processes or jobs of ``jobs``; ``recording`` writes what they score.
"""
