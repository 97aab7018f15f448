"""Measure the engine on one GPU within nine minutes: ``python -m benchmarks.gpu --out DIR``.

``measure.py`` installs wheels, looks at the machine (``preflight.py``) and runs the stages of ``stages.py``, each in a
process with a time limit (``stage.py``). These four need only Python; what they run also needs torch and the packages
that the preflight names.
"""
