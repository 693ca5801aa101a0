"""Look at a dataset: pages of records in storage or training order, one record, histograms.

Nothing here knows of HTTP or of torch. Every call is bounded, in time and in memory.

    results.py    what a view is asked and answers, as plain data: Query, Page, Card, Record
    view.py       the view of one dataset, and open_view
    pictures.py   thumbnails, overlays and crops, as files that a browser shows
"""
