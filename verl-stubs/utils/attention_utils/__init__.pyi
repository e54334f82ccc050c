from functorch.einops import rearrange as rearrange
from verl.compat.toolkit.attention import index_first_axis as index_first_axis
from verl.compat.toolkit.attention import pad_input as pad_input
from verl.compat.toolkit.attention import unpad_input as unpad_input
