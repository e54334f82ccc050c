"""Engines that answer requests one by one, from many conversations at once."""
