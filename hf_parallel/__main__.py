"""`python -m hf_parallel` is `hf-parallel`."""

from __future__ import annotations

from hf_parallel.cli.main import main


if __name__ == "__main__":
    main()
