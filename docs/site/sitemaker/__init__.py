"""Makes the sources of the site, which Sphinx turns into HTML. docs/site/build.py calls both."""

from pathlib import Path

# The repository.
ROOT = Path(__file__).resolve().parents[3]
