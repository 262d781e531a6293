"""Teachers: vLLM engines that score finished responses."""
