"""Heads in training, one kind a file. What learns is the drafter's own module (``drafters/heads``)."""
