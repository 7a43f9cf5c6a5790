#!/usr/bin/env bash
# Installs engines for tests/test_real_engines.py: Open MPI, MPICH, torchrun and Ray from PyPI, each in an environment of its own below
# the folder that is given, and SLURM from Debian's packages where this user may install them. Torch is large: ENGINES="openmpi mpich"
# installs these two alone. Ray's workers import llmpar, and find its libraries where the project's Python has them.
set -euo pipefail
folder=${1:?give a folder for the environments}
python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}
declare -A packages=([openmpi]=openmpi [mpich]=mpich [torch]=torch==2.13.0 [ray]='ray[train]==2.60.0')
for engine in ${ENGINES:-openmpi mpich torch ray}; do
  [ -x "$folder/$engine/bin/pip" ] || "$python" -m venv "$folder/$engine"
  "$folder/$engine/bin/pip" install --quiet --disable-pip-version-check "${packages[$engine]}"
done
if [ -d "$folder/ray" ]; then
  site='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$python" -c "$site" >"$("$folder/ray/bin/python" -c "$site")/of_the_project.pth"
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then
  apt-get install -y --no-install-recommends slurm-wlm munge iproute2
fi
echo "run: LLMPAR_ENGINES=$folder python -m pytest tests/test_real_engines.py -m engines -n0"
