"""The command ``verl``. A subcommand imports what it needs, so that help and explanations answer at once."""
