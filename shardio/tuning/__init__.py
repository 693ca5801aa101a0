"""Advises. Explains and measures how a dataset is read, and says what to set."""
