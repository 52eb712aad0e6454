"""`python -m shmlane`: the command line, for where no script is on PATH."""

from __future__ import annotations

from shmlane.cli import main

if __name__ == "__main__":
    main()
