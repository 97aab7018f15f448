"""Tokenised sources on disk.

* ``token_cache``: a source as tokens, in shards
* ``store``: the shard of some files is found by what they hold, or built
* ``grouping``: which files share a shard
* ``writing``, ``shard``: how a shard is written and read
* ``workers``, ``worker``: all cores build shards; jobs do so by ``launch.jobs.shard_jobs``
"""
