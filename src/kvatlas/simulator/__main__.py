"""`python -m kvatlas.simulator`: see `process.py`."""

from kvatlas.simulator.process import main

raise SystemExit(main())
