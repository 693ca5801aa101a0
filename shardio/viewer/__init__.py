"""Look at a dataset: pages of records in storage or training order, one record, histograms.

Nothing here knows of HTTP or of torch. Every call is bounded, in time and in memory.

    results.py    what a view is asked and answers, as plain data: Query, Page, Card, Record
    view.py       the view of one dataset, and open_view
    records.py    the part of a view that reads single records
    cards.py      the cards of a page
    answers.py    the rows that answer a query, each made once
    rows.py       which record stands at each position: stored, sorted, as in training
    columns.py    columns of the index of the whole dataset
    kept.py       what is kept, within a limit, and the thread that makes it
    search.py     a text in keys, for a bounded time
    histogram.py  classes, sizes and columns of the index, counted
    details.py    fields as text; boxes, tiles
    pictures.py   thumbnails, overlays and crops, as files that a browser shows
    checks.py     damaged records, and those that packing left out
"""
