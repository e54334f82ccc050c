"""Agent loops: conversations of several turns, and what runs them."""
