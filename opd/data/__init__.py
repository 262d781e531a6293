"""Data rows to samples, and samples to packed batches."""
