"""Statistics, figures and the page of a report."""
