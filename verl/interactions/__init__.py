"""Simulated users: who answers the policy where a row of the data names an interaction."""
