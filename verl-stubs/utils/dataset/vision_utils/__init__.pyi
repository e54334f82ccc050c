from verl.vision.images import process_image as process_image
