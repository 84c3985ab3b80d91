#!/usr/bin/env bash
# Every command once, and the snippets of the guide's page on Python, with the program as pip installed it (PYTHON, the
# first argument), from an empty folder. A line for each; the first that fails ends the script. At its end nothing in
# site-packages may have changed: that holds also for root, whom permission bits do not stop. `make test-wheel` runs it.
set -euo pipefail
python=$(realpath --no-symlinks "$1")
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
export PATH="$(dirname "$python"):$PATH" HF_HUB_OFFLINE=1

contents() { find "$packages" -printf '%p %s %T@\n' | sort; }  # a file that came and went shows in its folder's time

check() {  # check WORD ...: run the command; its output is shown only if it fails
    local began=$SECONDS
    if ! rlhf-kl "$@" >output 2>&1 </dev/null; then
        cat output
        echo "FAILED   rlhf-kl $*"
        exit 1
    fi
    echo "fine, $((SECONDS - began)) s   rlhf-kl $*"
}

inside=$(rlhf-kl --version >version && "$python" -c 'import rlhf_kl; print(rlhf_kl.__file__)')
[[ $inside == "$packages"/* ]] || { echo "FAILED   not the installed program: $inside"; exit 1; }
contents >before
check --help
check init mine
check guide
check guide running
check config show mine/mine.yaml --set policy.model=builtin:reviews-small
check config validate smollm2_sentiment.yaml
check config schema
check simulate
check train --config smoke.yaml --quiet
check train --config smoke.yaml --quiet --seed 1 --output-dir runs/other
check doctor --config smoke.yaml --quiet
check doctor --config smoke.yaml --processes 8 --device-memory 24GB --quiet
check eval
check report
check generate --prompt "The hotel"
check scale
check compare runs/smoke runs/other
cat >small.yaml <<'YAML'
policy: {model: builtin:reviews-small}
sft: {epochs: 0.01, learning_rate: 1.0e-3}
YAML
cat >reward.yaml <<'YAML'
policy: {model: builtin:reviews-small}
reward_model: {epochs: 0.01, learning_rate: 1.0e-3}
YAML
check sft --config small.yaml --quiet
check reward-model --config reward.yaml --quiet
# The snippets of the guide, with a model of the user's.
cat >snippets.py <<'PY'
import re, shutil, sys
from pathlib import Path

import rlhf_kl
from rlhf_kl.builtin.world import world_file

shutil.copytree(world_file("builtin:reviews-small", "policy"), "my-model")
page = (Path(rlhf_kl.__file__).parent / "guide" / "running.md").read_text(encoding="utf-8")
for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
    exec(snippet, {"__name__": "__main__"})
PY
if ! "$python" snippets.py >output 2>&1; then
    cat output
    echo "FAILED   the snippets of the guide's page on Python"
    exit 1
fi
echo "fine   the snippets of the guide's page on Python"
contents >after
if ! diff before after; then
    echo "FAILED   these files in site-packages changed"
    exit 1
fi
echo "the wheel is fine: every command ran from an empty folder, and site-packages is as it was"
