"""Images in prompts: how they are read, become tokens and positions, and enter a vision-language model.

    row of a file ── messages.py ──► messages with image parts ── chat template ──► ids, one placeholder per image
        │ images.py                                                                    │ prompts.py
        ▼                                                                              ▼
    PIL images ── the model's image processor ──► pixel_values, image_grid_thw ──► ids with all image tokens,
                                                        │                          position_ids (positions.py)
                                                        ▼
                                  model.py: features of the vision tower at the places of the image tokens

The families are those of :data:`verl.vision.families.FAMILIES`.
"""
