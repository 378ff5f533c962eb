"""The measurements behind ``agentcomm bench``: ``codecs`` times them, ``accuracy`` trains.

Nothing of the library imports this package, and it needs more than the library does: the extra
``bench``.
"""
