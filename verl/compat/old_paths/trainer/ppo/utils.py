"""Public path of the roles, and of what a configuration needs: :mod:`verl.trainer.roles`."""

from verl.trainer.roles import Needs as Needs
from verl.trainer.roles import Role as Role
from verl.trainer.roles import need_critic as need_critic
from verl.trainer.roles import need_reference_policy as need_reference_policy
from verl.trainer.roles import need_reward_model as need_reward_model
from verl.trainer.roles import need_teacher_policy as need_teacher_policy
