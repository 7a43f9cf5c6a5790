"""``python -m llmpar`` is ``llmpar``."""

import sys

from llmpar.cli import main

sys.exit(main())
