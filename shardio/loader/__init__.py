"""Feeds training. Batches are made ahead by processes and threads, and copied to the device."""
