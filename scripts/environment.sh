# Sourced by scripts/demo and scripts/test. environment.sh EXTRA [FOLDER] makes a virtual environment with this package and the
# extra. The default folder .venv gets the releases of tests/releases.txt. In any other folder, pip chooses the releases.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${2:-.venv}"
python="${PYTHON:-python3}"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# A GPU machine gets the newest PyTorch, any other machine the release that the tests are written against.
if ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
  if command -v nvidia-smi >/dev/null; then
    "${pip[@]}" torch
  else # without CUDA's libraries, which take gigabytes, if PyTorch's own index can be reached
    "${pip[@]}" --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 2>/dev/null || true
    "${pip[@]}" torch==2.13.0 triton==3.7.1
  fi
fi
if [ "$venv" = .venv ]; then "${pip[@]}" -c tests/releases.txt -e ".[$1]"; else "${pip[@]}" -e ".[$1]"; fi
