"""The load test behind `tandem bench`: load generator, targets, figures and reports."""
