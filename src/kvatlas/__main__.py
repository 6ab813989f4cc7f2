"""`python -m kvatlas` is the `kvatlas` command."""

from kvatlas.cli.main import main

main()
