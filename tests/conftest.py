import os

# Before DeepSpeed is imported anywhere: no search for a GPU, no warning that there is none.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

deepspeed.utils.logger.setLevel("ERROR")
