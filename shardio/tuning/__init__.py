"""Advise: explain and measure how a dataset is read, and say what to set.

Its files:

    explain        what training with these options will be like
    cost           the arithmetic of it: reads, memory, steps
    traffic        what a machine asks an object store for
    advice         the rules that warn
    tune           which shuffle buffer to set
    tune_result    its rows, its text and its verdicts
    simulate       the order for any buffer, without bytes
    bench          what this machine can do with a dataset
    bench_process  one repeat, in a process of its own
    bench_row      a row of the result, and what limits it
    meter          watch: waiting beside working, in the training loop
    verdict        what the times of a pass mean, and what to change
    plot           the pictures
    text           the tables and the JSON
"""
