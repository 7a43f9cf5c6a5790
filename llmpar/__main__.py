"""``python -m llmpar`` is ``llmpar``."""

import sys

from llmpar.cli.main import main

sys.exit(main())
