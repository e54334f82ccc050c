"""Commands that show the data of a run before it starts, and the samples that a run has written."""
