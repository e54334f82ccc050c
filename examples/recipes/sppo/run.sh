#!/usr/bin/env bash
# The toy task, then the recipe on it, on a laptop. Further arguments are settings: trainer.total_training_steps=30
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3}
$python examples/recipes/make_task.py
$python examples/recipes/sppo/main_sppo.py "$@"
