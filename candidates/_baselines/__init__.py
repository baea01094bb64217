"""Adapters of other implementations that serve more than one operation, and what adapters share."""
