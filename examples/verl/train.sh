#!/usr/bin/env bash
# GRPO by verl with rollouts of the service: the settings that matter. NOT RUN HERE (no GPU); see docs/verl.md.
#
#   MODEL=/models/qwen DATA=/data/tasks.parquet examples/verl/train.sh
#
# The service is this account's own, unless ROLLOUT_URL and ROLLOUT_API_KEY name another.

set -euo pipefail
: "${MODEL:?checkpoint}" "${DATA:?Parquet file, see docs/verl.md}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# verl's processes import examples.verl and rollout.
export PYTHONPATH="$here/../..:${PYTHONPATH:-}"
ROLLOUT_URL="${ROLLOUT_URL:-$(python3 -c 'from rollout import Client; print(Client().base_url)')}"
export ROLLOUT_URL
# The trainer that registers verl's servers and gives each step's weights their version.
export VERL_USE_EXTERNAL_MODULES=examples.verl.trainer
# The service labels and pauses the servers through these.
export VLLM_SERVER_DEV_MODE=1

exec python3 -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=rollout_service \
    trainer.v1.sampler.sync_refill_failed_groups=True \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$DATA" data.val_files="$DATA" \
    data.max_prompt_length=2048 data.max_response_length=8192 \
    data.return_raw_chat=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.disable_log_stats=False \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.enable_scale_out=True \
    actor_rollout_ref.rollout.agent.default_agent_loop=rollout_service \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/agent_loops.yaml" \
    "$@"
