"""A report of every kernel on one machine: right or wrong, how fast beside the library's.

It is what somebody with a chip that we do not own can send us: ``tessella doctor --report``.
"""
