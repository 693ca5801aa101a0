"""Read packed datasets. Records are fetched, decoded and collated to batches."""
