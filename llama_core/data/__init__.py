"""From text to batches.

``files`` gives records, ``tokenizers`` and ``chat`` make tokens of them, ``shards`` keeps these, ``records`` has the
kinds of records that objectives read. The files beside these rooms join them: from a data source to a rank's batches.
"""
