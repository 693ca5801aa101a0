"""The exit codes of the commands, as `--help` shows them."""

DONE, FAILED, USAGE, DAMAGED, SKIPPED, BUSY, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

MEANINGS = {
    DONE: "done",
    FAILED: "failed",
    USAGE: "wrong usage",
    DAMAGED: "damage was found",
    SKIPPED: "done, but something was left out or lost",
    BUSY: "another packer works there",
    INTERRUPTED: "interrupted",
}
