"""The exit codes of the commands, as `--help` shows them."""

DONE, FAILED, USAGE, DAMAGED, SKIPPED, BUSY, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

TEXT = """\
exit codes:
  0 done   1 failed   2 wrong usage   3 damage was found   4 done, but files were left out
  5 another packer works there   130 interrupted
"""
