"""Loading of tools."""
