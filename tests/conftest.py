"""Settings that every test shares."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # no test asserts a wall-clock time, not even Hypothesis' own
settings.load_profile("untimed")
