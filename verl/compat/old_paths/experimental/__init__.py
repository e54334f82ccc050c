"""Public paths of parts that were called experimental."""
