"""Write docs/config.md from the config classes."""

from __future__ import annotations

from pathlib import Path

from opd.recipes import keys_markdown

if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "config.md").write_text(keys_markdown(), encoding="utf-8")
