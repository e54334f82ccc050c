"""HTTP endpoint of a model in the forms of OpenAI and Anthropic, on loopback.

::

    client ──► app ──► protocol (chat, …) ──► ModelCall ──► ModelBackend ──► ModelAnswer ──► protocol ──► client
                                                              │
                                                              ├─ TrajectoryRecorder: the policy of one trajectory
                                                              └─ a backend of your own
"""
