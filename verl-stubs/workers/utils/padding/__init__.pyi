from verl.compat.toolkit.padding import left_right_2_no_padding as left_right_2_no_padding
from verl.compat.toolkit.padding import no_padding_2_padding as no_padding_2_padding
