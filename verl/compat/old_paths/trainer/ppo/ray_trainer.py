"""Public path of the trainer, the column functions of its step, and what chooses its roles."""

from verl.algorithms import AdvantageEstimator as AdvantageEstimator
from verl.compat.own_fit.ray_trainer import RayPPOTrainer as RayPPOTrainer
from verl.protocol import compute_response_mask as compute_response_mask
from verl.trainer.ppo.stages import apply_kl_penalty as apply_kl_penalty
from verl.trainer.ppo.stages import compute_advantage as compute_advantage
from verl.trainer.roles import Role as Role
from verl.trainer.roles import need_critic as need_critic
from verl.trainer.roles import need_reference_policy as need_reference_policy
from verl.trainer.roles import need_reward_model as need_reward_model
