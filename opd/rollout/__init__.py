"""The student's vLLM engines, which answer prompts."""
