#!/usr/bin/env bash
# A job in four shards, with a GPU each; a fifth step joins their results:
#
#     first=$(sbatch --parsable examples/slurm_array.sh prompts.jsonl results TARGET)
#     sbatch --dependency=afterok:$first --wrap "specdec merge results all.jsonl"
#
# A shard that a node took with it is requeued, and goes on from its output. The folder is one that all nodes see.
#SBATCH --job-name=specdec
#SBATCH --array=0-3
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --signal=TERM@60
set -euo pipefail
prompts=$1 folder=$2 target=$3
mkdir -p "$folder"
exec specdec generate --batch-file "$prompts" --output "$folder/$SLURM_ARRAY_TASK_ID.jsonl" --target "$target" \
  --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" --rows 32 --no-progress
