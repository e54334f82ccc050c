"""Workers with teachers: frozen models whose log-probs of the policy's responses the policy learns from.

A worker of any kind has ``init_model()`` and ``compute_teacher_log_prob(data, teacher)``, which returns columns of
:mod:`verl.schema`: ``teacher_logprobs`` and, as far as the loss reads them and the kind of teacher knows them,
``teacher_topk_ids``, ``teacher_topk_logprobs`` and ``teacher_entropys``.
"""
