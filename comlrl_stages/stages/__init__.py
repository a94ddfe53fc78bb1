"""One module per stage: read artifacts, call the library, write artifacts."""
