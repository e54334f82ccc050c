"""Tools to inspect, end, restart and lock out processes; none of them imports Ray."""
