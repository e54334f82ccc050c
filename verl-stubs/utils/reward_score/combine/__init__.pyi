from verl.utils.reward_score.parts import weighted_sum as weighted_sum
