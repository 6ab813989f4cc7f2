"""The `kvatlas` command: one module per subcommand, each a thin shell over the rooms below.

Here: options, printing, exit codes. Not here: anything a library user would miss.
"""

__all__: list[str] = []
