from verl.config.model import HFModelConfig as HFModelConfig
