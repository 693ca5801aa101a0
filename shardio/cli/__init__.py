"""Runs the commands of `shardio`. Parses their options and prints their results."""
