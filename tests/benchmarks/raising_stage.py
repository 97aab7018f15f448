"""A stage that raises after its first row."""


def raises(bench):
    yield {"what": "before", "value": 1.0}
    yield bench.attempted({"what": "one row"}, len)
    len(5)
    yield {"what": "never"}


def goes_on(bench):
    yield {"what": "after", "value": 2.0}
