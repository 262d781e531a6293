#!/bin/sh
# Makes locks/cpu.txt anew: tools/lock_cpu.sh [further `uv pip compile` options, as --find-links FOLDER]. Needs uv.
set -eu
cd "$(dirname "$0")/.."
never="; sys_platform == 'never'"
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
for package in torchvision torchaudio torchcodec triton llm llama-cpp-python; do
  echo "$package $never"
done > "$overrides"
uv pip compile pyproject.toml --extra cpu --extra dev --override "$overrides" \
  --python-version 3.11 --no-annotate --no-header "$@" | sed 's/+cpu$//' > locks/cpu.txt.new
mv locks/cpu.txt.new locks/cpu.txt
