"""`opd` distils a large language model (the teacher) into a small one (the student)."""

__version__ = "0.1.0"
