"""Timings of tests stay out of the user's cache."""

from tests.support.timings import own_cache as own_cache
