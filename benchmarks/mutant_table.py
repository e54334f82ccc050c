"""Faults as they are made in programs like this one, for :mod:`benchmarks.mutants`.

``old`` occurs once in its file, or in one file of the package if that one was moved.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault: a text of the package, what stands in its place, and the tests that should fail."""

    area: str
    file: str
    """Below ``verl/``."""
    old: str
    new: str
    tests: str
    """Files below ``tests/`` without ``test_`` and ``.py``, the quickest first; found by name if they moved."""


ALGORITHMS = (
    Mutant(
        "algorithms",
        "algorithms/policy_losses/token.py",
        "losses = torch.maximum(plain, clipped)",
        "losses = torch.minimum(plain, clipped)",
        "algorithms/policy_losses_by_hand",
    ),
    Mutant(
        "algorithms",
        "algorithms/policy_losses/token.py",
        "losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)",
        "",
        "algorithms/policy_losses",
    ),
    Mutant(
        "algorithms",
        "algorithms/policy_losses/token.py",
        "bounded_log_ratio(log_prob, old_log_prob).detach().exp()",
        "bounded_log_ratio(log_prob, old_log_prob).exp()",
        "algorithms/policy_losses_by_hand algorithms/policy_losses",
    ),
    Mutant(
        "algorithms",
        "algorithms/policy_losses/sequence.py",
        "carried = mean + token_log_ratio - token_log_ratio.detach()",
        "carried = mean.expand_as(token_log_ratio)",
        "algorithms/policy_losses_by_hand algorithms/policy_loss_laws",
    ),
    Mutant(
        "algorithms",
        "algorithms/kl.py",
        "torch.exp(-bounded) + bounded - 1.0",
        "torch.exp(bounded) - bounded - 1.0",
        "algorithms/kl",
    ),
    Mutant(
        "algorithms",
        "algorithms/kl.py",
        "zero_masked(token_level_scores, response_mask) - beta * kl",
        "zero_masked(token_level_scores, response_mask) + beta * kl",
        "algorithms/kl",
    ),
    Mutant(
        "algorithms",
        "algorithms/kl.py",
        "carrier - carrier.detach() + value.detach()",
        "carrier - carrier.detach() + value",
        "algorithms/kl",
    ),
    Mutant(
        "algorithms",
        "algorithms/kl.py",
        "self.value *= 1.0 + error * n_steps / self.horizon",
        "self.value *= 1.0 + error / self.horizon",
        "algorithms/kl",
    ),
    Mutant(
        "algorithms",
        "algorithms/groups.py",
        "self.total((x - self.mean(x)) ** 2) / (self.size - 1).clamp(min=1)",
        "self.total((x - self.mean(x)) ** 2) / self.size.clamp(min=1)",
        "algorithms/advantages_groups",
    ),
    Mutant(
        "algorithms",
        "algorithms/groups.py",
        "return cls(row_groups, response_mask.bool().any(-1), max(indices, default=-1) + 1)",
        "return cls(of_rows, torch.ones_like(of_rows, dtype=torch.bool), max(indices, default=-1) + 1)",
        "algorithms/advantages algorithms/advantage_laws trainer/failures_in_a_run",
    ),
    Mutant(
        "algorithms",
        "algorithms/response_advantages.py",
        "left_out = centred * torch.where(groups.is_alone, 1.0, groups.size / (groups.size - 1))",
        "left_out = centred",
        "algorithms/advantages_groups algorithms/advantages",
    ),
    Mutant(
        "algorithms",
        "algorithms/token_advantages.py",
        "zero_masked(discounted_sum(deltas, response_mask, gamma_t * lam), response_mask)",
        "zero_masked(discounted_sum(deltas, response_mask, gamma * lam), response_mask)",
        "algorithms/turn_discount",
    ),
    Mutant(
        "algorithms",
        "algorithms/token_advantages.py",
        "torch.where(valid, factor, torch.ones_like(x))",
        "factor * torch.ones_like(x)",
        "algorithms/advantages_per_token algorithms/advantages",
    ),
    Mutant(
        "algorithms",
        "algorithms/aggregate.py",
        "tokens = lengths.sum() if batch_num_tokens is None else batch_num_tokens",
        "tokens = lengths.sum()",
        "algorithms/aggregate",
    ),
    Mutant(
        "algorithms",
        "algorithms/aggregate.py",
        "group_ids[1:] > group_ids.cummax(0).values[:-1]",
        "group_ids[1:] >= group_ids.cummax(0).values[:-1]",
        "trainer/ppo/sequences",
    ),
    Mutant(
        "algorithms",
        "algorithms/rollout_correction.py",
        "exponent.sum(-1, keepdim=True).expand_as(exponent)",
        "masked_mean(exponent, response_mask, axis=-1).unsqueeze(-1).expand_as(exponent)",
        "algorithms/rollout_correction",
    ),
    Mutant(
        "algorithms",
        "algorithms/value_loss.py",
        "0.5 * torch.maximum(plain_error, clipped_error)",
        "0.5 * torch.minimum(plain_error, clipped_error)",
        "algorithms/value_loss",
    ),
)

ENGINE = (
    Mutant(
        "engine",
        "workers/losses.py",
        "loss = loss - self.entropy_coeff * entropy",
        "loss = loss + self.entropy_coeff * entropy",
        "workers/losses",
    ),
    Mutant(
        "engine",
        "workers/engine/loss.py",
        "        dist.all_reduce(counts, group=group)\n",
        "",
        "workers/engine/two_ranks",
    ),
    Mutant(
        "engine",
        "workers/engine/loss.py",
        "weight = 1.0 if is_extreme(name) else num_tokens / self._tokens",
        "weight = 1.0",
        "workers/engine/engine",
    ),
    Mutant(
        "engine",
        "workers/engine/model/inputs.py",
        "where = places + prompt_length - (0 if at_token else 1)",
        "where = places + prompt_length",
        "workers/engine/model_inputs workers/engine/engine",
    ),
    Mutant(
        "engine",
        "workers/engine/model/inputs.py",
        "            before.append(parent)",
        "            before.append(None)",
        "workers/engine/shared_prompts",
    ),
    Mutant(
        "engine",
        "workers/engine/optimizer.py",
        "        torch._foreach_mul_(parts, factor)",
        "        torch._foreach_mul(parts, factor)",
        "workers/engine/engine",
    ),
    Mutant(
        "engine",
        "workers/engine/fsdp/engine.py",
        "if not math.isfinite(grad_norm):\n            trained =",
        "if math.isnan(grad_norm):\n            trained =",
        "workers/engine/non_finite",
    ),
    Mutant(
        "engine",
        "workers/engine/fsdp/engine.py",
        "        self.weight_version += 1\n",
        "",
        "workers/engine/engine workers/fsdp_workers workers/training_workers",
    ),
    Mutant(
        "engine",
        "workers/engine/passes.py",
        "    columns |= {name: torch.zeros_like(columns[name]) for name in COUNTED if name in columns}\n",
        "",
        "workers/engine/experts",
    ),
    Mutant(
        "engine",
        "workers/engine/passes.py",
        '            if kind == "train":\n                clear_gradients()\n',
        "",
        "workers/engine/passes",
    ),
    Mutant(
        "engine",
        "workers/update.py",
        "manual_seed((self.shuffle_seed or 0) * 1_000_003 + step)",
        "manual_seed((self.shuffle_seed or 0) * 1_000_003)",
        "workers/update workers/update_settings",
    ),
    Mutant(
        "engine",
        "utils/torch_functional.py",
        "return min(1.0, (step + 1) / (num_warmup_steps + 1))",
        "return min(1.0, step / (num_warmup_steps + 1))",
        "utils/torch_functional",
    ),
)

ROLLOUT = (
    Mutant(
        "rollout",
        "workers/rollout/sampling.py",
        "(rank < top_k[:, None])",
        "(rank <= top_k[:, None])",
        "workers/rollout/sampling",
    ),
    Mutant(
        "rollout",
        "workers/rollout/sampling.py",
        "(log_probs.gather(-1, tokens[:, None]).squeeze(-1) - log_kept_mass).float()",
        "log_probs.gather(-1, tokens[:, None]).squeeze(-1).float()",
        "workers/rollout/sampling",
    ),
    Mutant(
        "rollout",
        "workers/rollout/native_rollout.py",
        "        self.weight_version = NO_WEIGHTS\n        self._forget_texts()\n",
        "        self.weight_version = NO_WEIGHTS\n",
        "workers/rollout/native_serving workers/rollout/native_rollout",
    ),
    Mutant(
        "rollout",
        "workers/rollout/native/generation.py",
        "text = group.prompt_ids + answer.token_ids[:-1]",
        "text = group.prompt_ids + answer.token_ids",
        "workers/rollout/native_serving workers/rollout/native_rollout",
    ),
    Mutant(
        "rollout",
        "workers/rollout/native/generation.py",
        "        self._release(gone)\n",
        "",
        "workers/rollout/native_serving workers/rollout/aborted",
    ),
    Mutant(
        "rollout",
        "workers/rollout/weights.py",
        "if tensors and not (start + tensor.nbytes <= part_bytes and self._has_room(start + tensor.nbytes)):",
        "if tensors and not self._has_room(start + tensor.nbytes):",
        "workers/rollout/weights",
    ),
)

SERVING = (
    Mutant(
        "serving",
        "serving/router.py",
        "            if pending.answer.cancelled():\n                engine.link.cancel(request_id)\n",
        "",
        "serving/router",
    ),
    Mutant(
        "serving",
        "serving/router.py",
        "if home is None or self._engines[home].is_lost:",
        "if home is None:",
        "serving/router",
    ),
    Mutant(
        "serving",
        "serving/router.py",
        "while not engine.is_lost and len(engine.running) < self._room:",
        "while not engine.is_lost and len(engine.running) <= self._room:",
        "serving/router",
    ),
    Mutant(
        "serving",
        "workers/rollout/request_queue.py",
        "            self._is_closed = True\n            self._waiting.clear()\n",
        "            self._is_closed = True\n",
        "workers/rollout/request_queue",
    ),
    Mutant(
        "serving",
        "agents/slots.py",
        "            if was_given:\n                self._pass_on()\n",
        "",
        "agents/slots",
    ),
)

AGENTS = (
    Mutant(
        "agents",
        "agents/conversation.py",
        'self.sequence.add(messages[0]["role"], ids, 0, [0.0] * len(ids))',
        'self.sequence.add(messages[0]["role"], ids, 1, [0.0] * len(ids))',
        "agents/conversation",
    ),
    Mutant(
        "agents",
        "agents/conversation.py",
        "                list(sequence.response_mask),\n",
        "                sequence.response_mask,\n",
        "agents/conversation",
    ),
    Mutant(
        "agents",
        "agents/worker.py",
        '"status": "context_full" if is_cut and output.status == "done" else output.status,',
        '"status": output.status,',
        "agents/bad_loops agents/agent_loops",
    ),
    Mutant(
        "agents",
        "agents/tool_agent.py",
        "room = conversation.tokens_left(self.response_length) - 1",
        "room = conversation.tokens_left(self.response_length)",
        "agents/agent_loops agents/malformed_calls",
    ),
    Mutant(
        "agents",
        "agents/episode.py",
        "await self._thread.call(self._environment.close)",
        "pass",
        "agents/environment_agent",
    ),
    Mutant(
        "agents",
        "agents/tool_agent.py",
        'refused = [] if limit == "context_full" else [',
        "refused = [",
        "agents/malformed_calls",
    ),
)

DATA = (
    Mutant(
        "data",
        "datasets/sampler.py",
        "generator.manual_seed(offset + epoch)",
        "generator.manual_seed(offset)",
        "datasets/samplers",
    ),
    Mutant(
        "data",
        "datasets/sampler.py",
        "            self.pending = sampler.draw()\n            sampler.batches += 1\n",
        "            self.pending = sampler.draw()\n",
        "datasets/samplers",
    ),
    Mutant(
        "data",
        "datasets/loss_mask.py",
        "mask[begin:end] = [1] * (end - begin)",
        "mask[begin : end - 1] = [1] * (end - 1 - begin)",
        "datasets/loss_mask",
    ),
    Mutant(
        "data",
        "trainer/balance.py",
        "position = {row: n for n, row in enumerate(self.order) if n not in self.padding}",
        "position = {row: n for n, row in enumerate(self.order)}",
        "trainer/ppo/sequences",
    ),
    Mutant(
        "vision",
        "vision/positions.py",
        "steps[image_places[-1] + 1] = max(rows, columns, int(times[-1]) + 1)",
        "steps[of_image[-1] + 1] = max(rows, columns)",
        "vision/videos vision/prompts",
    ),
    Mutant(
        "vision",
        "vision/positions.py",
        "last = torch.stack([row_positions[0].amax(), *[row_positions[1:].amax()] * 3])",
        "last = torch.stack([of_row[0].amax()] * 4)",
        "vision/prompts vision/rollout_with_images",
    ),
    Mutant(
        "vision",
        "vision/images.py",
        "math.floor(height / scale / factor), math.floor(width / scale / factor)",
        "math.ceil(height / scale / factor), math.ceil(width / scale / factor)",
        "vision/prompts",
    ),
)

RECOVERY = (
    Mutant(
        "recovery",
        "checkpoint/steps.py",
        "    folder.commit()\n    replace_text(root / LATEST, str(step))\n",
        "    replace_text(root / LATEST, str(step))\n    folder.commit()\n",
        "checkpoint/run",
    ),
    Mutant(
        "recovery",
        "checkpoint/steps.py",
        "any(run == process and step <= last for process, last in lineage)",
        "any(step <= last for process, last in lineage)",
        "checkpoint/run",
    ),
    Mutant(
        "recovery",
        "trainer/recovery.py",
        "self._held = [*self._held[-1:], HeldState(state, snapshots)]",
        "self._held = [HeldState(state, snapshots)]",
        "trainer/held_states",
    ),
    Mutant(
        "recovery",
        "trainer/recovery.py",
        "self.in_a_row = self.in_a_row + 1 if step == self.last_step + 1 else 1",
        "self.in_a_row += 1",
        "trainer/bad_steps",
    ),
    Mutant(
        "recovery",
        "checkpoint/states.py",
        '    torch.set_rng_state(state["torch"])\n',
        "",
        "trainer/loop checkpoint/run workers/engine/engine_checkpoint",
    ),
)

REWARDS = (
    Mutant(
        "rewards",
        "workers/reward_manager/scores.py",
        "places = torch.arange(1, response_mask.size(1) + 1)",
        "places = torch.arange(response_mask.size(1))",
        "workers/reward_manager/naive",
    ),
    Mutant(
        "rewards",
        "experience/dynamic_sampling.py",
        "np.flatnonzero((highest > lowest)[group])",
        "np.flatnonzero((highest >= lowest)[group])",
        "experience/dynamic_sampling",
    ),
    Mutant(
        "rewards",
        "scorers/countdown.py",
        "value == target and Counter(numbers) == allowed",
        "value == target and set(numbers) == set(allowed)",
        "scorers/countdown",
    ),
    Mutant(
        "rewards",
        "trainer/ppo/trainer.py",
        "context.number > self.typed_config.trainer.critic_warmup",
        "context.number >= self.typed_config.trainer.critic_warmup",
        "trainer/run trainer/own_fit",
    ),
    Mutant(
        "rewards",
        "experience/lockstep.py",
        "baselines.repeat(self._n, interleave=True)",
        "baselines.repeat(self._n, interleave=False)",
        "trainer/run",
    ),
)

CONFIG = (
    Mutant(
        "config",
        "trainer/config/rules_sizes.py",
        "        elif (size * n) % parts:",
        "        elif size % parts:",
        "trainer/config/sizes trainer/config/validate",
    ),
    Mutant(
        "config",
        "trainer/config/rules_sizes.py",
        "values, 2 * data.max_length, sharing)",
        "values, data.max_length, sharing)",
        "trainer/config/validate trainer/config/sizes",
    ),
    Mutant(
        "config",
        "config/machine.py",
        "return min(used, default=1)",
        "return max(used, default=1)",
        "trainer/config/machine",
    ),
)

NEWER_PACKAGES = (
    Mutant(
        "tinker",
        "plugins/serve/losses.py",
        "ratio = (log_probs.detach() - old_log_probs).exp().clamp",
        "ratio = (log_probs - old_log_probs).exp().clamp",
        "plugins/serve/losses",
    ),
    Mutant(
        "tinker",
        "plugins/serve/losses.py",
        "return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)",
        "return -ratio.clamp(low, high) * advantages",
        "plugins/serve/losses",
    ),
    Mutant(
        "experience",
        "experience/store.py",
        "for part in (group.responses, group.scores):",
        "for part in (group.responses,):",
        "experience/store",
    ),
    Mutant(
        "experience",
        "experience/free_running.py",
        "behind[versions == version] = self._updates - self._updates_of_version[version]",
        "behind[versions == version] = self._steps - self._updates_of_version[version]",
        "experience/resume_between_transfers",
    ),
    Mutant(
        "experience",
        "experience/free_running.py",
        "min(capacity, self._last_step * self._batch_size - active)",
        "wanted",
        "experience/resume_between_transfers",
    ),
    Mutant(
        "teacher",
        "workers/teacher/average.py",
        "average.lerp_(weight.to(average), 1 - self._decay)",
        "average.lerp_(weight.to(average), self._decay)",
        "workers/average",
    ),
    Mutant(
        "teacher",
        "workers/teacher/average.py",
        "weight.copy_(copies.pop(name))",
        "kept.pop(name)",
        "workers/average",
    ),
    Mutant(
        "teacher",
        "algorithms/distillation.py",
        "in_span = (span_ends >= 0) & mask",
        "in_span = mask.bool()",
        "algorithms/distillation",
    ),
    Mutant(
        "cuda",
        "backends/cuda/layers.py",
        "return rule and (_FusedOnePlusRMSNorm if rule[1] else _FusedRMSNorm)",
        "return rule and (_FusedRMSNorm if rule[1] else _FusedOnePlusRMSNorm)",
        "backends/cuda/cuda_layers",
    ),
    Mutant(
        "cuda",
        "backends/cuda/layers.py",
        'return _FusedMLP if activation_of(module.get_submodule("act_fn")) == "silu" else None',
        "return _FusedMLP",
        "backends/cuda/cuda_layers",
    ),
    Mutant(
        "experience",
        "experience/ahead.py",
        "with_age(experience.batch, self._updates - pending.updates)",
        "with_age(experience.batch, context.number - 1 - pending.updates)",
        "experience/ahead",
    ),
    Mutant(
        "experience",
        "experience/ahead.py",
        "return PendingExperience(step, self._updates, sampled, step_context)",
        "return PendingExperience(step, context.number - 1, sampled, step_context)",
        "experience/ahead",
    ),
    Mutant(
        "experience",
        "experience/free_running.py",
        "self._updates_of_version[agents.weight_version] = self._updates",
        "self._updates_of_version[agents.weight_version] = self._steps",
        "experience/free_running",
    ),
    Mutant(
        "tinker",
        "plugins/serve/worker.py",
        "factor = limit / norm if 0 < limit < norm else 1.0",
        "factor = limit / norm if 0 < limit else 1.0",
        "plugins/serve/service",
    ),
    Mutant(
        "tinker",
        "plugins/serve/worker.py",
        "self._gradients[name] += part.values",
        "self._gradients[name] = part.values.clone()",
        "plugins/serve/service",
    ),
    Mutant(
        "tinker",
        "plugins/serve/worker.py",
        '"betas": (settings.beta1, settings.beta2),',
        '"betas": (settings.beta1, settings.beta1),',
        "plugins/serve/service",
    ),
    Mutant(
        "tinker",
        "plugins/serve/computing.py",
        "prompt[len(prompt) - task.scored :] = next(scores)[-task.scored :].tolist()",
        "prompt[len(prompt) - task.scored :] = next(scores)[: task.scored].tolist()",
        "plugins/serve/service",
    ),
    Mutant(
        "tinker",
        "plugins/serve/jobs.py",
        "(batch if fits else remaining).append(job)",
        "batch.append(job)",
        "plugins/serve/service",
    ),
    Mutant(
        "tinker",
        "plugins/serve/worker.py",
        "version = self._versions.setdefault(saved, len(self._versions))",
        "version = self._versions.setdefault(folder, len(self._versions))",
        "plugins/serve/service",
    ),
    Mutant(
        "transfer",
        "workers/transfer/driver.py",
        "if all(facts.held.get(name) == digest for facts in receivers)}",
        "}",
        "workers/transfer/conformance",
    ),
    Mutant(
        "transfer",
        "workers/transfer/sender.py",
        "held = {name: digest for name, digest in plan.held.items() if self._digests.get(name) == digest}",
        "held = dict(self._digests)",
        "workers/transfer/conformance",
    ),
)

MUTANTS = (*ALGORITHMS, *ENGINE, *ROLLOUT, *SERVING, *AGENTS, *DATA, *RECOVERY, *REWARDS, *CONFIG, *NEWER_PACKAGES)
