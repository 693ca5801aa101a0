"""Reads and writes the formats of other libraries, a reader and a writer side by side."""
