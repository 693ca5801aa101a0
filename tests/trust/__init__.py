"""Attacks on what shardio promises, by chance and for as long as asked: `tools/trust --minutes N`.
A section ends when it has done what it is for: its goal.

    __main__.py  the command: shares the time, prints the table
    child.py     a section in a process of its own, which may die or hang
    section.py   what a section is; the list of them is SECTIONS in sections.py
    damage.py    files of every kind, in every format, damaged under every reader
    bits.py      every bit and every length of small datasets, each once
    unfinished.py  journals, finished shards and cache entries, damaged
    crash.py     SIGKILL, and failing calls, at each call of commands that write, or at any moment
    commands.py  the command line in forks, with calls.c, which kills or fails calls
    power.py     what a disk may hold after a power cut, made from a log of the calls
    stores.py    commands that write into an object store, killed or refused at a request
    workers.py   worker processes that die, raise or hang, in both loaders
    races.py     commands that write at once, readers meanwhile, processes on one cache
    leaks.py     epochs, and what is open after them

Machinery that tests use, too, is in tests/support.
"""
