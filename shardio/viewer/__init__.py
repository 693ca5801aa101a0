"""Look at a dataset in a browser: pages of records, one record, histograms, a report.

A view answers what a page asks. It knows nothing of HTTP or of torch, and every call is bounded,
in time and in memory. The pages are made of its answers.

    results.py    what a view is asked and answers, as plain data: Query, Page, Card, Record
    view.py       the view of one dataset, and open_view
    records.py    the part of a view that reads single records
    cards.py      the cards of a page
    answers.py    the rows that answer a query, each made once
    rows.py       which record stands at each position: stored, sorted, as in training
    columns.py    columns of the index of the whole dataset
    cache.py      columns, filters and orders that are kept, and made in one thread
    search.py     a text in keys, for a bounded time
    histogram.py  classes, sizes and columns of the index, counted
    details.py    fields as text; boxes, tiles
    pictures.py   thumbnails, overlays and crops, as files that a browser shows
    checks.py     damaged records, and those that packing left out
    views.py      the views of a dataset's splits
    address.py    what an address asks for, and the address of each view
    pages.py      the pages by their addresses
    grid.py       the page of records, and the way between its pages
    charts.py     how batches mix, and histograms, as shapes to draw
    shell.py      what all pages show around their own part
    render.py     templates/ filled in, all values escaped; the only door to Jinja2
    report.py     one file with the summary and the first records and batches
    server.py     the server: on loopback, read-only, behind a token
"""
